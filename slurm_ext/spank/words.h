/* The command line of this very process. */
#ifndef CKPTLESS_WORDS_H
#define CKPTLESS_WORDS_H

#include "cmdline.h"

/* Scans it; nothing is said where /proc is not to be had. The strings live as long as the process. */
void ckptless_cmdline_own(enum ckptless_command command, struct ckptless_cmdline *said);

#endif

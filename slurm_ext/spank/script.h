/* What the #SBATCH lines of a batch script say, as far as the submit side needs it. */
#ifndef CKPTLESS_SCRIPT_H
#define CKPTLESS_SCRIPT_H

#include <stdbool.h>
#include <stddef.h>

#include "cmdline.h"

#define CKPTLESS_SCRIPT_SIZE 65536

/*
 * Reads the #SBATCH lines of `text`, which is changed: the strings of `said` point into it. Like sbatch it
 * stops at the first line that is neither empty nor a comment. `text` must end with a NUL.
 */
void ckptless_script_scan(char *text, struct ckptless_cmdline *said);

/*
 * The beginning of a regular file, into CKPTLESS_SCRIPT_SIZE bytes, NUL included. False for anything that
 * could only be read once (a pipe, a terminal) or not at all.
 */
bool ckptless_script_read(const char *path, char *text);

#endif

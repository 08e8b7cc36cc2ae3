/* Remote context: slurmstepd, once for each step and node. */
#ifndef CKPTLESS_REMOTE_H
#define CKPTLESS_REMOTE_H

#include <slurm/spank.h>

#include "config.h"

/* Gives the step CKPTLESS and its kin back where --export kept them away. */
void ckptless_remote_environment(spank_t sp);

/* In the task, before its program is executed: puts the launcher in front, where asked and possible. */
void ckptless_remote_task(spank_t sp, const struct ckptless_config *config);

#endif

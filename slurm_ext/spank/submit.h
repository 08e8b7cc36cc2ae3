/* Submit side: sbatch and salloc (allocator context) and srun (local context). */
#ifndef CKPTLESS_SUBMIT_H
#define CKPTLESS_SUBMIT_H

#include <slurm/spank.h>

#include "config.h"

/* Before Slurm reads #SBATCH lines, environment and command line, in this order. */
void ckptless_submit_init(void);

/* Slurm's callback for the option. ESPANK_BAD_ARG, after one sentence to the user, ends the command. */
int ckptless_submit_spec(const char *text);

/* All is read. Ends the command (exit code 1) where the whole makes no sense: Slurm ignores a return value. */
void ckptless_submit_ready(spank_t sp, const struct ckptless_config *config);

#endif

/* Prolog and epilog context: a slurmstepd of uid 0 on every node of the job. */
#ifndef CKPTLESS_JOB_SCRIPT_H
#define CKPTLESS_JOB_SCRIPT_H

#include <stdbool.h>
#include <slurm/spank.h>

#include "config.h"

/* Tells the daemon of a job that asked for ckptless. Nothing that goes wrong here concerns the job. */
void ckptless_job_script(spank_t sp, const struct ckptless_config *config, bool ended);

#endif

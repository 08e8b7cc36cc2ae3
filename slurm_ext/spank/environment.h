/* The variables by which the submit side, the job and its nodes know what was asked. */
#ifndef CKPTLESS_ENVIRONMENT_H
#define CKPTLESS_ENVIRONMENT_H

#include <stdbool.h>
#include <stddef.h>

#include "options.h"

/* Slurm's mark on what spank_job_control_setenv sets, in the job (in the prolog it is SPANK_) */
#define CKPTLESS_IN_JOB "SLURM_SPANK_"
/* asks slurmstepd to put the launcher in front of this step's tasks */
#define CKPTLESS_WRAP CKPTLESS_IN_JOB "CKPTLESS_WRAP"

/* when the job was submitted, in ns: what tells it from another one that has its number, after a requeue too */
#define CKPTLESS_SUBMITTED "CKPTLESS_SUBMITTED"

/* tells the job_submit plugin that the user wants the job to end with a lost node */
#define CKPTLESS_KILL "CKPTLESS_KILL"

#define CKPTLESS_VARIABLES 16

struct ckptless_variable {
	const char *name;
	bool given;
	char value[CKPTLESS_SPEC_SIZE];
};

/* The variables of a job with this spec, the same ones in the same order for any spec. */
void ckptless_variables(const struct ckptless_spec *spec, struct ckptless_variable out[CKPTLESS_VARIABLES]);

#endif

/* What slurmstepd does for a step of a job that asked for ckptless. */
#include "remote.h"

#include <stdio.h>
#include <string.h>

#include "environment.h"
#include "options.h"

void ckptless_remote_environment(spank_t sp)
{
	struct ckptless_variable variables[CKPTLESS_VARIABLES];
	char text[CKPTLESS_SPEC_SIZE];
	char why[CKPTLESS_WHY_SIZE];
	struct ckptless_spec spec;

	/* Slurm lets its own names through --export=NONE, and CKPTLESS not */
	if (spank_getenv(sp, CKPTLESS_IN_JOB "CKPTLESS", text, sizeof(text)) != ESPANK_SUCCESS)
		return;
	if (!ckptless_spec_parse(text, &spec, why, sizeof(why)) || !spec.on)
		return;
	ckptless_variables(&spec, variables);
	for (size_t i = 0; i < CKPTLESS_VARIABLES; i++) {
		if (variables[i].given)
			spank_setenv(sp, variables[i].name, variables[i].value, 0);
	}
}

#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(23, 11, 0)
static const char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/');

	return slash ? slash + 1 : path;
}

void ckptless_remote_task(spank_t sp, const struct ckptless_config *config)
{
	const char *front[] = { config->launcher };
	char asked[8];
	char **argv;
	int argc;

	if (spank_getenv(sp, CKPTLESS_WRAP, asked, sizeof(asked)) != ESPANK_SUCCESS)
		return;
	spank_unsetenv(sp, CKPTLESS_WRAP); /* it was said for this step, not for those within it */
	if (spank_get_item(sp, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS || argc < 1)
		return;
	if (!strcmp(base_name(argv[0]), base_name(config->launcher)))
		return;
	if (spank_prepend_task_argv(sp, 1, front) != ESPANK_SUCCESS)
		slurm_error("ckptless: %s could not be put in front of %s", config->launcher, argv[0]);
}
#else
void ckptless_remote_task(spank_t sp, const struct ckptless_config *config)
{
	(void)sp;
	(void)config;
}
#endif

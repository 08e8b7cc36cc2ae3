/* The SPANK plugin "ckptless": which function runs in which of Slurm's processes; nothing else. */
#include <stdbool.h>
#include <stddef.h>

#include <slurm/spank.h>

#include "config.h"
#include "job_script.h"
#include "remote.h"
#include "submit.h"

SPANK_PLUGIN(ckptless, 1)

static struct ckptless_config config;
static bool configured; /* else nothing is done, and --ckptless is not known to Slurm */

static int on_option(int val, const char *text, int remote)
{
	(void)val;
	if (remote) /* slurmstepd has it all from the job's environment, settled */
		return ESPANK_SUCCESS;
	return ckptless_submit_spec(text);
}

static struct spank_option options[] = {
	{ "ckptless", "[SPEC]",
	  "training that outlives its processes and nodes; SPEC is auto, off or a list of spares=N, "
	  "min-nodes=N, max-nodes=N, step=N, sizes=N:N, scale-up-after=N[s|m], scale-timeout=N[s|m], "
	  "graceful=N[s|m], draw-in=N, draw-in-patience=N[s|m], replicas=N, max-stall=N[s|m], "
	  "bandwidth=RATE, interface=NAME",
	  2, 0, on_option },
	SPANK_OPTIONS_TABLE_END
};

static bool configure(int argc, char **argv)
{
	const char *unknown = "";

	if (ckptless_config_parse(argc, argv, &config, &unknown))
		return true;
	slurm_error("ckptless: plugstack.conf: \"%s\" is not known; want socket=PATH, launcher=PATH or elastic=no|PARTITION,...", unknown);
	return false;
}

int slurm_spank_init(spank_t sp, int argc, char **argv)
{
	spank_context_t context = spank_context();

	configured = configure(argc, argv);
	if (!configured)
		return -ESPANK_BAD_ARG;
	if (context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR)
		ckptless_submit_init();
	else if (context != S_CTX_REMOTE)
		return ESPANK_SUCCESS;
	for (struct spank_option *option = options; option->name; option++) {
		if (spank_option_register(sp, option) != ESPANK_SUCCESS)
			return -ESPANK_ERROR;
	}
	return ESPANK_SUCCESS;
}

int slurm_spank_init_post_opt(spank_t sp, int argc, char **argv)
{
	spank_context_t context = spank_context();

	(void)argc;
	(void)argv;
	if (!configured)
		return ESPANK_SUCCESS;
	if (context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR)
		ckptless_submit_ready(sp, &config);
	else if (context == S_CTX_REMOTE)
		ckptless_remote_environment(sp);
	return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t sp, int argc, char **argv)
{
	(void)argc;
	(void)argv;
	if (configured)
		ckptless_remote_task(sp, &config);
	return ESPANK_SUCCESS;
}

/* Prolog and epilog come without slurm_spank_init. What is wrong here must not drain a node: always success. */
int slurm_spank_job_prolog(spank_t sp, int argc, char **argv)
{
	if (configure(argc, argv))
		ckptless_job_script(sp, &config, false);
	return ESPANK_SUCCESS;
}

int slurm_spank_job_epilog(spank_t sp, int argc, char **argv)
{
	if (configure(argc, argv))
		ckptless_job_script(sp, &config, true);
	return ESPANK_SUCCESS;
}

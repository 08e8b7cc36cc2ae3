/*
 * job_submit/ckptless: what slurmctld itself sees to for jobs that asked for --ckptless. It makes them no-kill,
 * and refuses as many spares as nodes, sizes that cannot be, arrays whose tasks are to draw nodes in, and
 * heterogeneous jobs, which the submit command cannot always know.
 * It reads what the SPANK plugin has put into the job (spank_job_env), which is the user's word.
 */
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <stdint.h>
#include <string.h>

#include "environment.h"
#include "options.h"

const char plugin_name[] = "ckptless job submit plugin";
const char plugin_type[] = "job_submit/ckptless";
const uint32_t plugin_version = SLURM_VERSION_NUMBER;

/* In slurmctld and in none of Slurm's headers: it frees err_msg with its own xfree. */
extern char *slurm_xstrdup(const char *text) __attribute__((weak));
extern void slurm_info(const char *format, ...) __attribute__((format(printf, 1, 2)));

int init(void);
int fini(void);
int job_submit(job_desc_msg_t *job, uint32_t submit_uid, char **err_msg);
int job_modify(job_desc_msg_t *job, void *record, uint32_t submit_uid, char **err_msg);

static const char *asked(const job_desc_msg_t *job, const char *name)
{
	size_t size = strlen(name);
	const char *text = NULL;

	for (uint32_t i = 0; job->spank_job_env && i < job->spank_job_env_size; i++) {
		const char *entry = job->spank_job_env[i];

		if (entry && !strncmp(entry, name, size) && entry[size] == '=')
			text = entry + size + 1;
	}
	return text;
}

static int refuse(const char *why, uint32_t uid, char **err_msg)
{
	slurm_info("job_submit/ckptless: uid %u: refused: %s", uid, why);
	if (err_msg && slurm_xstrdup)
		*err_msg = slurm_xstrdup(why);
	return ESLURM_INVALID_NODE_COUNT;
}

int init(void)
{
	return SLURM_SUCCESS;
}

int fini(void)
{
	return SLURM_SUCCESS;
}

int job_submit(job_desc_msg_t *job, uint32_t submit_uid, char **err_msg)
{
	const char *text = asked(job, "CKPTLESS");
	char why[CKPTLESS_WHY_SIZE];
	struct ckptless_spec spec;
	long nodes;

	if (!text)
		return SLURM_SUCCESS;
	if (!ckptless_spec_parse(text, &spec, why, sizeof(why))) /* the SPANK plugin lets none of these pass */
		return refuse(why, submit_uid, err_msg);
	if (spec.on && job->het_job_offset != NO_VAL)
		return refuse(CKPTLESS_NO_HET, submit_uid, err_msg);
	if (ckptless_draws(&spec) && job->array_inx)
		return refuse(CKPTLESS_NO_DRAW_IN_ARRAY, submit_uid, err_msg);
	nodes = job->max_nodes == NO_VAL || job->max_nodes == INFINITE ? 0 : (long)job->max_nodes;
	if (!ckptless_fits(&spec, nodes, job->min_nodes == job->max_nodes, why, sizeof(why)))
		return refuse(why, submit_uid, err_msg);
	if (spec.on && job->kill_on_node_fail == NO_VAL16 && !asked(job, CKPTLESS_KILL))
		job->kill_on_node_fail = 0;
	return SLURM_SUCCESS;
}

int job_modify(job_desc_msg_t *job, void *record, uint32_t submit_uid, char **err_msg)
{
	(void)job;
	(void)record;
	(void)submit_uid;
	(void)err_msg;
	return SLURM_SUCCESS;
}

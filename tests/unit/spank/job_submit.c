/* Calls the job_submit plugin as slurmctld does, with job descriptions that Slurm's own library has begun. */
#include <assert.h>
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <stdio.h>
#include <string.h>

int job_submit(job_desc_msg_t *job, uint32_t submit_uid, char **err_msg);
char *slurm_xstrdup(const char *text);

/* slurmctld's, in this program's own words */
static char said[512];
char *slurm_xstrdup(const char *text)
{
	snprintf(said, sizeof(said), "%s", text);
	return said;
}

static uint32_t component = NO_VAL; /* as slurmctld itself sets it */
static char *array; /* NULL: the job is none */
static uint32_t least; /* of the nodes; 0: as many as the most */

static job_desc_msg_t submitted(int expected, uint32_t nodes, uint16_t kill, char *one, char *two)
{
	char *environment[] = { "OTHER=1", NULL, one, two };
	char *message = NULL;
	job_desc_msg_t job;
	int rc;

	slurm_init_job_desc_msg(&job);
	assert(job.kill_on_node_fail == NO_VAL16);
	job.het_job_offset = component;
	job.array_inx = array;
	job.min_nodes = least ? least : nodes;
	job.max_nodes = nodes;
	job.kill_on_node_fail = kill;
	job.spank_job_env = environment;
	job.spank_job_env_size = 4;
	rc = job_submit(&job, 1000, &message);
	if (rc != expected || (rc != SLURM_SUCCESS) != (message != NULL)) {
		fprintf(stderr, "%s: %d, not %d: %s\n", one ? one : "-", rc, expected, message ? message : "-");
		assert(0);
	}
	job.spank_job_env = NULL;
	return job;
}

int main(void)
{
	const int ok = SLURM_SUCCESS, no = ESLURM_INVALID_NODE_COUNT;

	assert(submitted(ok, 4, NO_VAL16, NULL, NULL).kill_on_node_fail == NO_VAL16);
	assert(submitted(ok, 4, NO_VAL16, "CKPTLESS=off", NULL).kill_on_node_fail == NO_VAL16);
	assert(submitted(ok, 4, NO_VAL16, "CKPTLESS=auto", NULL).kill_on_node_fail == 0);
	assert(submitted(ok, 4, NO_VAL16, "CKPTLESS=spares=3", NULL).kill_on_node_fail == 0);
	assert(submitted(ok, 4, 1, "CKPTLESS=auto", NULL).kill_on_node_fail == 1);
	assert(submitted(ok, 4, NO_VAL16, "CKPTLESS=auto", "CKPTLESS_KILL=1").kill_on_node_fail == NO_VAL16);
	assert(submitted(ok, NO_VAL, NO_VAL16, "CKPTLESS=spares=9", NULL).kill_on_node_fail == 0);
	assert(submitted(ok, 4, NO_VAL16, "CKPTLESS_SPARES=9", NULL).kill_on_node_fail == NO_VAL16);
	submitted(no, 4, NO_VAL16, "CKPTLESS=spares=4", NULL);
	assert(strstr(said, "with 4 spares, a job of 4 nodes has none left to train on"));
	submitted(no, 4, NO_VAL16, "CKPTLESS=rm -rf", NULL);
	assert(strstr(said, "\"rm -rf\" is not known"));
	submitted(ok, 4, NO_VAL16, "CKPTLESS=spares=1,min-nodes=2", NULL);
	submitted(no, 4, NO_VAL16, "CKPTLESS=spares=1,sizes=2:4", NULL);
	assert(strstr(said, "the job trains on 3 nodes, spares apart, which is none of sizes=2:4"));
	least = 3; /* it may yet get 3 */
	submitted(ok, 4, NO_VAL16, "CKPTLESS=sizes=2:3", NULL);
	submitted(no, 4, NO_VAL16, "CKPTLESS=spares=4,sizes=2:3", NULL);
	least = 0;
	submitted(ok, 4, NO_VAL16, "CKPTLESS=max-nodes=6,draw-in=2,draw-in-patience=5", NULL);
	submitted(no, 4, NO_VAL16, "CKPTLESS=max-nodes=7,draw-in=2", NULL);
	assert(strstr(said, "to grow to 7 nodes, and has 4 to train on, 0 spares, and 2 to draw in; ask"));
	array = "0-3";
	submitted(ok, 4, NO_VAL16, "CKPTLESS=draw-in=0", NULL);
	submitted(ok, 4, NO_VAL16, "CKPTLESS=auto", NULL);
	submitted(no, 4, NO_VAL16, "CKPTLESS=draw-in=2", NULL);
	assert(strstr(said, "Slurm adds no node to a task of a job array; leave out draw-in"));
	array = NULL;
	component = 0; /* of a heterogeneous job */
	submitted(ok, 4, NO_VAL16, NULL, NULL);
	submitted(ok, 4, NO_VAL16, "CKPTLESS=off", NULL);
	submitted(no, 4, NO_VAL16, "CKPTLESS=auto", NULL);
	assert(strstr(said, "a heterogeneous job (with : or hetjob) cannot train with ckptless"));
	puts("job_submit: as it should be");
	return 0;
}

/*
 * ckptless-notify: tells ckptlessd that a job begins or ends on this node. For Slurm's Prolog= and Epilog=,
 * where the SPANK plugin is not configured on compute nodes.
 *
 *   ckptless-notify [--socket PATH] [prolog|epilog]
 *
 * Always exits 0 and within a second: Slurm drains a node whose prolog fails.
 */
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "config.h"
#include "notify.h"
#include "options.h"

static void too_late(int signal)
{
	(void)signal;
	_exit(0);
}

/* The deadlines in notify.c should do; this is for what they cannot see, such as a file system that hangs. */
static void end_within_a_second(void)
{
	const struct itimerval second = { .it_value = { .tv_sec = 1 } };
	const struct sigaction action = { .sa_handler = too_late };

	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &second, NULL);
}

/* A whole number below 2^32 in the environment, which Slurm itself has set. */
static bool environment_number(const char *name, uint32_t *out)
{
	const char *text = getenv(name);
	char *end;
	unsigned long long value;

	if (!text || *text < '0' || *text > '9')
		return false;
	value = strtoull(text, &end, 10);
	if (*end || value > UINT32_MAX)
		return false;
	*out = (uint32_t)value;
	return true;
}

int main(int argc, char **argv)
{
	const char *socket_path = CKPTLESS_SOCKET;
	const char *context = getenv("SLURM_SCRIPT_CONTEXT"); /* prolog_slurmd, epilog_slurmd */
	const char *asked = getenv("SPANK_CKPTLESS");	      /* the user's word */
	char text[CKPTLESS_SPEC_SIZE] = "";
	char why[CKPTLESS_WHY_SIZE];
	struct ckptless_notice notice = { .spec = text };
	struct ckptless_spec spec;
	const char *failed;

	end_within_a_second();
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--socket") && i + 1 < argc)
			socket_path = argv[++i];
		else
			context = argv[i];
	}
	if (!asked)
		return 0;
	if (!context || (strncmp(context, "prolog", 6) && strncmp(context, "epilog", 6)) ||
	    !environment_number("SLURM_JOB_ID", &notice.job_id) ||
	    !environment_number("SLURM_JOB_UID", &notice.uid)) {
		fprintf(stderr, "ckptless-notify: not called by Slurm: SLURM_JOB_ID, SLURM_JOB_UID or "
				"SLURM_SCRIPT_CONTEXT is not what a prolog or epilog gets\n");
		return 0;
	}
	if (ckptless_spec_parse(asked, &spec, why, sizeof(why))) {
		if (!spec.on)
			return 0;
		ckptless_spec_format(&spec, text);
	}
	notice.ended = !strncmp(context, "epilog", 6);
	failed = ckptless_notify(&notice, socket_path, CKPTLESS_NOTIFY_MS);
	if (failed)
		fprintf(stderr, "ckptless-notify: the daemon was not told: %s: %s: %s\n", socket_path, failed,
			strerror(errno));
	return 0;
}

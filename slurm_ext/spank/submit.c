/* Takes the user's options, refuses what makes no sense, and makes job and steps outlive a node. */
#define _GNU_SOURCE /* program_invocation_short_name */
#include "submit.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "environment.h"
#include "options.h"
#include "script.h"
#include "words.h"

/*
 * How Slurm hands an option on to what a job starts: in its own form of name, read by each srun, sbatch and
 * salloc after #SBATCH lines and before the command line. We also give it our own variables by this.
 */
#define OPTION "_SLURM_SPANK_OPTION_ckptless_ckptless"
#define OPTION_IN_JOB CKPTLESS_IN_JOB OPTION

static const struct {
	const char *name, *value, *means;
} step_variables[] = {
	{ "SLURM_NO_KILL", "set", "a lost node ends the step" },
	{ "SLURM_KILL_BAD_EXIT", "0", "the first process that fails ends the step" },
	{ "SLURM_WAIT", "0", "the end of one process sets a deadline to the others" },
};
#define STEP_VARIABLES (sizeof(step_variables) / sizeof(*step_variables))

static struct {
	enum ckptless_command command;
	const char *prefix;		/* of the command's own variables: SBATCH, SALLOC, SLURM */
	struct ckptless_cmdline line;	/* what the command line says */
	struct ckptless_cmdline script; /* what the batch script says */
	struct ckptless_spec spec;	   /* the newest word of script, environment and command line */
	bool spec_given, spec_from_env;
	struct ckptless_spec job;	   /* srun: of the job around it */
	char bad_env[CKPTLESS_WHY_SIZE];   /* a sentence on the command's own variable */
	bool known_early;		   /* command line or environment decide, not the script */
	bool no_kill_asked, no_kill_is_ours;
} state;

static void refuse(const char *why)
{
	slurm_error("ckptless: %s", why);
	exit(1);
}

/* The value of SBATCH_CKPTLESS and the like; NULL if it is not there or empty. */
static const char *own_variable(const char *suffix, char name[40])
{
	const char *value;

	snprintf(name, 40, "%s_%s", state.prefix, suffix);
	value = getenv(name);
	return value && *value ? value : NULL;
}

/* A job started from within a ckptless job is one of its own: nothing of the outer one is its own. */
static void forget_outer_job(void)
{
	static const char *const names[] = { OPTION_IN_JOB, CKPTLESS_WRAP, CKPTLESS_IN_JOB CKPTLESS_KILL, CKPTLESS_IN_JOB CKPTLESS_SUBMITTED };
	struct ckptless_variable variables[CKPTLESS_VARIABLES];

	for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
		unsetenv(names[i]);
	ckptless_variables(&state.job, variables);
	for (size_t i = 0; i < CKPTLESS_VARIABLES; i++) {
		char name[64];

		snprintf(name, sizeof(name), CKPTLESS_IN_JOB "%s", variables[i].name);
		unsetenv(name);
		unsetenv(variables[i].name);
	}
	for (size_t i = 0; i < STEP_VARIABLES; i++) {
		const char *value = getenv(step_variables[i].name);

		if (value && !strcmp(value, step_variables[i].value))
			unsetenv(step_variables[i].name);
	}
}

static void read_script(void)
{
	static char text[CKPTLESS_SCRIPT_SIZE];
	static bool done;

	if (!done && state.command == CKPTLESS_SBATCH && state.line.program &&
	    ckptless_script_read(state.line.program, text))
		ckptless_script_scan(text, &state.script);
	done = true;
}

/* What the user says of --no-kill, wherever it is said; NULL: nothing. */
static const char *user_no_kill(void)
{
	char name[40];

	if (state.line.no_kill)
		return state.line.no_kill;
	if (!state.no_kill_is_ours && own_variable("NO_KILL", name))
		return own_variable("NO_KILL", name);
	return state.script.no_kill;
}

static bool user_wants_kill(void)
{
	const char *value = user_no_kill();

	return value && (!strcmp(value, "off") || !strcmp(value, "no"));
}

/* The command's own variable says it to Slurm, which reads the environment after the script's lines. */
static void ask_no_kill(void)
{
	char name[40];

	state.no_kill_asked = true;
	if (user_no_kill())
		return;
	snprintf(name, sizeof(name), "%s_NO_KILL", state.prefix);
	setenv(name, "set", 1);
	state.no_kill_is_ours = true;
}

/* Slurm has read it by now, or need not read it. Only srun's own name is for the steps within as well. */
static void drop_no_kill(void)
{
	char name[40];

	snprintf(name, sizeof(name), "%s_NO_KILL", state.prefix);
	if (state.no_kill_is_ours)
		unsetenv(name);
	state.no_kill_is_ours = false;
}

/* srun reads its environment after init, so its own step needs these as early as that. */
static void set_step_variables(bool tell)
{
	for (size_t i = 0; i < STEP_VARIABLES; i++) {
		const char *name = step_variables[i].name;
		const char *value = getenv(name);

		if (i == 0 && user_wants_kill())
			continue;
		if (!value)
			setenv(name, step_variables[i].value, 1);
		else if (tell && strcmp(value, step_variables[i].value))
			slurm_spank_log("ckptless: %s=%s is kept, as your environment has it: %s", name, value,
					step_variables[i].means);
	}
}

/* The environment's SPEC: handed to Slurm under the name by which it calls back between script and command line. */
static const char *adopt_environment(void)
{
	struct ckptless_spec spec;
	char why[CKPTLESS_WHY_SIZE];
	char name[40];
	const char *value = own_variable("CKPTLESS", name);

	if (!value)
		return NULL;
	if (!ckptless_spec_parse(value, &spec, why, sizeof(why))) {
		snprintf(state.bad_env, sizeof(state.bad_env), "%s: %.340s", name, why);
		return NULL;
	}
	state.spec_from_env = !state.line.spec;
	setenv(OPTION_IN_JOB, value, 1);
	return value;
}

/* srun in a ckptless job: what the job asked for holds where srun's own options say nothing. */
static const char *adopt_job(void)
{
	const char *value = getenv(OPTION_IN_JOB);
	char why[CKPTLESS_WHY_SIZE];

	if (!value)
		return NULL;
	if (state.command != CKPTLESS_SRUN) {
		forget_outer_job();
		return NULL;
	}
	if (!ckptless_spec_parse(value, &state.job, why, sizeof(why)))
		state.job.on = false;
	value = state.job.on ? "auto" : "off";
	setenv(OPTION_IN_JOB, value, 1);
	return value;
}

void ckptless_submit_init(void)
{
	const char *inherited, *env, *spec_text;
	struct ckptless_spec spec;
	char why[CKPTLESS_WHY_SIZE];

	state.command = spank_context() == S_CTX_LOCAL			       ? CKPTLESS_SRUN
			: !strcmp(program_invocation_short_name, "salloc") ? CKPTLESS_SALLOC
									       : CKPTLESS_SBATCH;
	state.prefix = state.command == CKPTLESS_SRUN	  ? "SLURM"
		       : state.command == CKPTLESS_SALLOC ? "SALLOC"
							  : "SBATCH";
	ckptless_cmdline_own(state.command, &state.line);
	inherited = adopt_job();
	env = adopt_environment();
	spec_text = state.line.spec ? state.line.spec : env ? env : inherited;
	if (!spec_text)
		return;
	state.known_early = true;
	if (!ckptless_spec_parse(spec_text, &spec, why, sizeof(why)) || !spec.on)
		return;
	read_script();
	ask_no_kill();
	if (state.command == CKPTLESS_SRUN)
		set_step_variables(false);
}

int ckptless_submit_spec(const char *text)
{
	char why[CKPTLESS_WHY_SIZE];

	if (!ckptless_spec_parse(text, &state.spec, why, sizeof(why))) {
		slurm_error("ckptless: --ckptless: %s", why);
		return ESPANK_BAD_ARG;
	}
	state.spec_given = true;
	if (state.known_early)
		return ESPANK_SUCCESS;
	/* an #SBATCH line, and the environment not read yet */
	read_script();
	if (state.spec.on)
		ask_no_kill();
	else
		drop_no_kill();
	return ESPANK_SUCCESS;
}

/*
 * How many nodes the spares are among, as far as that can be known here; 0 or less: not known. `*exactly` false:
 * at most so many. Spares that a step does not ask for itself are among all nodes of its job; which sizes a step on
 * some of these can have, ckptless-run knows.
 */
static long node_count(bool *exactly)
{
	const char *of_job = state.command == CKPTLESS_SRUN ? getenv("SLURM_JOB_NUM_NODES") : NULL;
	bool own = state.line.nodes && (!of_job || (state.line.spec && strstr(state.line.spec, "spares=")));

	*exactly = own ? !state.line.fewer : of_job ? !state.line.nodes : !state.script.fewer;
	if (own)
		return state.line.nodes;
	return of_job ? atol(of_job) : state.script.nodes;
}

/* The partitions that the job may go to, parted by commas; NULL: not said. */
static const char *partitions(void)
{
	const char *of_job = state.command == CKPTLESS_SRUN ? getenv("SLURM_JOB_PARTITION") : NULL;
	char name[40];

	if (of_job || state.line.partition)
		return of_job ? of_job : state.line.partition;
	return own_variable("PARTITION", name) ? own_variable("PARTITION", name) : state.script.partition;
}

/* Why no node can be added, NULL where one can. Whether a step trains that only inherits, ckptless-run knows. */
static const char *cannot_draw(bool only_inherited)
{
	char name[40];

	if (state.command == CKPTLESS_SRUN)
		return only_inherited ? NULL : CKPTLESS_NO_DRAW_IN_STEP;
	return state.line.array || state.script.array || own_variable("ARRAY_INX", name) ? CKPTLESS_NO_DRAW_IN_ARRAY
											 : NULL;
}

/* Sizes are said in one of two ways: where a step says its own in the one, the job's in the other do not count. */
static void take_sizes_from_job(struct ckptless_spec *spec)
{
	bool own = spec->step != CKPTLESS_NOT_SAID || ckptless_elastic(spec);

	if (spec->grow_after_s == CKPTLESS_NOT_SAID)
		spec->grow_after_s = state.job.grow_after_s;
	if (!own)
		memcpy(spec->sizes, state.job.sizes, sizeof(spec->sizes));
	if (spec->sizes[0])
		return;
	if (spec->min_nodes == CKPTLESS_NOT_SAID)
		spec->min_nodes = state.job.min_nodes;
	if (spec->max_nodes == CKPTLESS_NOT_SAID)
		spec->max_nodes = state.job.max_nodes;
	if (spec->step == CKPTLESS_NOT_SAID)
		spec->step = state.job.step;
}

static void take_rest_from_job(struct ckptless_spec *spec)
{
	if (!state.job.on)
		return;
	if (spec->spares == CKPTLESS_NOT_SAID)
		spec->spares = state.job.spares;
	if (spec->replicas == CKPTLESS_NOT_SAID)
		spec->replicas = state.job.replicas;
	if (spec->draw_in == CKPTLESS_NOT_SAID)
		spec->draw_in = state.job.draw_in;
	if (spec->draw_in_patience_s == CKPTLESS_NOT_SAID)
		spec->draw_in_patience_s = state.job.draw_in_patience_s;
	if (spec->max_stall_s == CKPTLESS_NOT_SAID)
		spec->max_stall_s = state.job.max_stall_s;
	if (!spec->bandwidth[0])
		memcpy(spec->bandwidth, state.job.bandwidth, sizeof(spec->bandwidth));
	if (!spec->interface[0])
		memcpy(spec->interface, state.job.interface, sizeof(spec->interface));
	take_sizes_from_job(spec);
}

/* For prolog, epilog and job. sbatch and salloc put these into the job's environment, srun does not. */
static void tell_nodes(spank_t sp, const char *name, const char *value)
{
	char in_job[80];

	snprintf(in_job, sizeof(in_job), CKPTLESS_IN_JOB "%s", name);
	if (state.command == CKPTLESS_SRUN)
		setenv(in_job, value, 1);
	if (spank_job_control_setenv(sp, name, value, 1) != ESPANK_SUCCESS)
		slurm_error("ckptless: %s could not be handed on to prolog and job", name);
}

static void tell_time(spank_t sp)
{
	struct timespec now;
	char text[40];

	if (state.command == CKPTLESS_SRUN && getenv("SLURM_JOB_ID"))
		return; /* a step: its job was submitted before */
	clock_gettime(CLOCK_REALTIME, &now);
	snprintf(text, sizeof(text), "%lld%09ld", (long long)now.tv_sec, now.tv_nsec);
	tell_nodes(sp, CKPTLESS_SUBMITTED, text);
}

static void publish(spank_t sp, const struct ckptless_spec *spec)
{
	struct ckptless_variable variables[CKPTLESS_VARIABLES];

	ckptless_variables(spec, variables);
	for (size_t i = 0; i < CKPTLESS_VARIABLES; i++) {
		if (!variables[i].given)
			continue;
		setenv(variables[i].name, variables[i].value, 1);
		tell_nodes(sp, variables[i].name, variables[i].value);
	}
	tell_time(sp);
	/* the one settled spec instead of the options as they were typed */
	tell_nodes(sp, OPTION, variables[0].value);
}

static void wrap_program(const struct ckptless_config *config)
{
	const char *program = state.line.program;
	const char *slash = program ? strrchr(program, '/') : NULL;

	if (SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(23, 11, 0)) {
		setenv(CKPTLESS_WRAP, "1", 1);
		return;
	}
	if (program && strcmp(slash ? slash + 1 : program, CKPTLESS_LAUNCHER) != 0)
		slurm_spank_log("ckptless: this version of Slurm cannot put %s in front of %s; "
				"say: srun --ckptless %s ...",
				config->launcher, program, CKPTLESS_LAUNCHER);
}

static void not_asked(void)
{
	if (state.no_kill_is_ours && state.line.spec && !state.spec_given)
		slurm_spank_log("ckptless: the program's own --ckptless was taken for an option, and no-kill was "
				"set; put -- in front of the program");
	drop_no_kill();
	if (state.job.on)
		forget_outer_job();
}

void ckptless_submit_ready(spank_t sp, const struct ckptless_config *config)
{
	struct ckptless_spec spec;
	char why[CKPTLESS_WHY_SIZE];
	bool only_inherited = state.job.on && !state.line.spec && !state.spec_from_env;
	const char *cannot;
	bool exactly;
	long nodes;

	if (state.bad_env[0] && !state.line.spec)
		refuse(state.bad_env);
	if (!state.spec_given || !state.spec.on) {
		not_asked();
		return;
	}
	spec = state.spec;
	if (state.line.het || state.script.het || (state.command == CKPTLESS_SRUN && getenv("SLURM_HET_SIZE")))
		refuse(CKPTLESS_NO_HET);
	take_rest_from_job(&spec);
	nodes = node_count(&exactly);
	if (!only_inherited && !ckptless_fits(&spec, nodes, exactly, why, sizeof(why)))
		refuse(why);
	cannot = ckptless_draws(&spec) ? cannot_draw(only_inherited) : NULL;
	if (cannot)
		refuse(cannot);
	if (ckptless_elastic(&spec) && !ckptless_elastic_allowed(config, partitions(), why, sizeof(why)))
		refuse(why);
	if (!state.no_kill_asked)
		slurm_spank_log("ckptless: --ckptless was found too late to set --no-kill; add --no-kill");
	if (user_wants_kill()) {
		slurm_spank_log("ckptless: --no-kill=off is kept, as you said it: a lost node ends the job");
		tell_nodes(sp, CKPTLESS_KILL, "1"); /* slurmctld cannot tell "off" from "not said" */
	}
	if (state.command != CKPTLESS_SRUN)
		drop_no_kill();
	set_step_variables(!only_inherited);
	publish(sp, &spec);
	if (state.command == CKPTLESS_SRUN && state.line.spec)
		wrap_program(config);
}

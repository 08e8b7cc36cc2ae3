/* What the words of a submit command say before Slurm has read them. Pure. */
#ifndef CKPTLESS_CMDLINE_H
#define CKPTLESS_CMDLINE_H

#include <stdbool.h>
#include <stddef.h>

enum ckptless_command { CKPTLESS_SRUN, CKPTLESS_SBATCH, CKPTLESS_SALLOC };

/* Strings point into the words. What a word says later wins, as in Slurm. */
struct ckptless_cmdline {
	const char *spec;    /* --ckptless: its value, "" without one; NULL: not there */
	const char *no_kill; /* --no-kill, -k: its value, "" without one; NULL: not there */
	const char *program; /* the first word that is no option: script or program; NULL: none */
	const char *partition; /* -p, --partition: one, or several parted by commas; NULL: not there */
	long nodes;	     /* -N, --nodes: the largest number allowed; 0: not there, -1: not readable */
	bool fewer;	     /* it is the larger one of two, as in 2-4 */
	bool array;	     /* -a, --array: it is a job array */
	bool het;	     /* there are several components: a word ":" before the program, or hetjob in a script */
};

/*
 * Reads `words` (without the command's own name) up to the program. Which of Slurm's options take a value in
 * the next word is known for Slurm's own options; of another plugin's option it is taken to do so.
 */
void ckptless_cmdline_scan(const char *const *words, size_t count, enum ckptless_command command,
			   struct ckptless_cmdline *said);

#endif

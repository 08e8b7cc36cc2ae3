/* What a user may ask of ckptless, and the rules for it. Pure: no Slurm, no environment, no I/O. */
#ifndef CKPTLESS_OPTIONS_H
#define CKPTLESS_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

#include "table.h" /* ranges and sentences that ckptless-run has, too */

#define CKPTLESS_NOT_SAID (-1)
#define CKPTLESS_BANDWIDTH_SIZE 24
#define CKPTLESS_INTERFACE_SIZE 160 /* eight names, or three IPv6 networks, joined by + */
#define CKPTLESS_SPEC_SIZE 256	   /* any spec in its one written form, with the final NUL; a notice has no room for more */
#define CKPTLESS_WHY_SIZE 256	 /* one sentence for the user */

/* A SPEC, taken apart. Numbers are CKPTLESS_NOT_SAID and texts are empty where the user said nothing. */
struct ckptless_spec {
	bool on;
	int spares;	 /* nodes */
	int replicas;	 /* copies of each shard */
	int max_stall_s; /* seconds */
	char bandwidth[CKPTLESS_BANDWIDTH_SIZE]; /* as it is written, with its unit */
	char interface[CKPTLESS_INTERFACE_SIZE]; /* or network, or several joined by + */
};

/*
 * Takes SPEC apart: "auto", "off" or a list of spares=N, replicas=R, max-stall=S[s|m], bandwidth=RATE,
 * interface=NAME.
 * NULL, "" and "(null)" (what Slurm 22.05 makes of an absent value) mean auto.
 * False: not valid; `why` then holds one sentence, without the option's name.
 */
bool ckptless_spec_parse(const char *text, struct ckptless_spec *spec, char *why, size_t why_size);

/* Writes a spec in its one form, into CKPTLESS_SPEC_SIZE bytes. Parsing it again gives the same spec. */
void ckptless_spec_format(const struct ckptless_spec *spec, char *text);

/* Whether a job of so many nodes (0 or less: not known) has one left to train on; false and a sentence if not. */
bool ckptless_fits(const struct ckptless_spec *spec, long nodes, char *why, size_t why_size);

#endif

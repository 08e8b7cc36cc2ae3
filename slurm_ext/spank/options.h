/* What a user may ask of ckptless, and the rules for it. Pure: no Slurm, no environment, no I/O. */
#ifndef CKPTLESS_OPTIONS_H
#define CKPTLESS_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>

#include "table.h" /* ranges and sentences that ckptless-run has, too */

#define CKPTLESS_NOT_SAID (-1)
#define CKPTLESS_BANDWIDTH_SIZE 24
#define CKPTLESS_INTERFACE_SIZE 160 /* eight names, or three IPv6 networks, joined by + */
#define CKPTLESS_SIZES_MOST 16
#define CKPTLESS_SIZES_SIZE (CKPTLESS_SIZES_MOST * 6) /* each of five digits at most, and what parts them */
#define CKPTLESS_SPEC_SIZE 512	   /* any spec in its one written form, with the final NUL */
#define CKPTLESS_WHY_SIZE 448	 /* one sentence for the user */

/* A SPEC, taken apart. Numbers are CKPTLESS_NOT_SAID and texts are empty where the user said nothing. */
struct ckptless_spec {
	bool on;
	int spares;	 /* nodes */
	int min_nodes, max_nodes; /* of those that train */
	int step;	 /* nodes that come or go at once */
	char sizes[CKPTLESS_SIZES_SIZE]; /* as they are written, ascending, parted by colons */
	int grow_after_s; /* seconds */
	int scale_timeout_s, graceful_s; /* seconds */
	int draw_in;	 /* nodes that may be added */
	int draw_in_patience_s; /* seconds */
	int replicas;	 /* copies of each shard */
	int max_stall_s; /* seconds */
	char bandwidth[CKPTLESS_BANDWIDTH_SIZE]; /* as it is written, with its unit */
	char interface[CKPTLESS_INTERFACE_SIZE]; /* or network, or several joined by + */
};

/*
 * Takes SPEC apart: "auto", "off" or a list of spares=N, min-nodes=N, max-nodes=N, step=N, sizes=N:N,
 * scale-up-after=S[s|m], scale-timeout=S[s|m], graceful=S[s|m], draw-in=N, draw-in-patience=S[s|m],
 * replicas=R, max-stall=S[s|m], bandwidth=RATE, interface=NAME.
 * NULL, "" and "(null)" (what Slurm 22.05 makes of an absent value) mean auto.
 * False: not valid; `why` then holds one sentence, without the option's name.
 */
bool ckptless_spec_parse(const char *text, struct ckptless_spec *spec, char *why, size_t why_size);

/* Writes a spec in its one form, into CKPTLESS_SPEC_SIZE bytes. Parsing it again gives the same spec. */
void ckptless_spec_format(const struct ckptless_spec *spec, char *text);

/* Whether the job may go on with another number of nodes. */
bool ckptless_elastic(const struct ckptless_spec *spec);

/* Whether nodes may be added to the job. */
bool ckptless_draws(const struct ckptless_spec *spec);

/*
 * Whether a job of so many nodes (0 or less: not known) has one left to train on, and the sizes that it asks
 * for; false and a sentence if not. Not `exactly`: it may get fewer nodes, and which sizes those give is not
 * known.
 */
bool ckptless_fits(const struct ckptless_spec *spec, long nodes, bool exactly, char *why, size_t why_size);

#endif

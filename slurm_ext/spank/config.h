/* The plugin's arguments in plugstack.conf. */
#ifndef CKPTLESS_CONFIG_H
#define CKPTLESS_CONFIG_H

#include <stdbool.h>
#include <stddef.h>

#define CKPTLESS_SOCKET "/run/ckptless/ckptlessd.sock"
#define CKPTLESS_LAUNCHER "ckptless-run"

struct ckptless_config {
	const char *socket;   /* the daemon's Unix socket */
	const char *launcher; /* what goes in front of a task, where Slurm can do that */
	const char *elastic;  /* partitions that may have elastic jobs, parted by commas, or "no"; NULL: all */
};

/* Reads "key=value" arguments. False: `*unknown` is the one that is not known or has no value. */
bool ckptless_config_parse(int argc, char **argv, struct ckptless_config *config, const char **unknown);

/*
 * Whether a job in these partitions (parted by commas; NULL: not known) may be elastic; false and a sentence if
 * not. It may start in any of them.
 */
bool ckptless_elastic_allowed(const struct ckptless_config *config, const char *partitions, char *why, size_t why_size);

#endif

/* The plugin's arguments in plugstack.conf. */
#ifndef CKPTLESS_CONFIG_H
#define CKPTLESS_CONFIG_H

#include <stdbool.h>

#define CKPTLESS_SOCKET "/run/ckptless/ckptlessd.sock"
#define CKPTLESS_LAUNCHER "ckptless-run"

struct ckptless_config {
	const char *socket;   /* the daemon's Unix socket */
	const char *launcher; /* what goes in front of a task, where Slurm can do that */
};

/* Reads "key=value" arguments. False: `*unknown` is the one that is not known or has no value. */
bool ckptless_config_parse(int argc, char **argv, struct ckptless_config *config, const char **unknown);

#endif

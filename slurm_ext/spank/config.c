/* plugstack.conf: optional .../ckptless_spank.so [socket=PATH] [launcher=PATH] [elastic=no|PARTITION,...] */
#include "config.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "table.h"

static const struct {
	const char *key;
	size_t offset;
} keys[] = {
	{ "socket=", offsetof(struct ckptless_config, socket) },
	{ "launcher=", offsetof(struct ckptless_config, launcher) },
	{ "elastic=", offsetof(struct ckptless_config, elastic) },
};

static bool set(struct ckptless_config *config, const char *argument)
{
	for (size_t i = 0; i < sizeof(keys) / sizeof(*keys); i++) {
		size_t size = strlen(keys[i].key);

		if (strncmp(argument, keys[i].key, size) || argument[size] == '\0')
			continue;
		*(const char **)((char *)config + keys[i].offset) = argument + size;
		return true;
	}
	return false;
}

/* Whether `name`, of `size` bytes, is one of those in `list`. */
static bool listed(const char *list, const char *name, size_t size)
{
	for (const char *at = list; *at; at += strcspn(at, ",")) {
		at += *at == ',';
		if (strcspn(at, ",") == size && !strncmp(at, name, size))
			return true;
	}
	return false;
}

bool ckptless_elastic_allowed(const struct ckptless_config *config, const char *partitions, char *why, size_t why_size)
{
	if (!config->elastic)
		return true;
	if (!strcmp(config->elastic, "no")) {
		snprintf(why, why_size, CKPTLESS_NOT_HERE);
		return false;
	}
	for (const char *at = partitions ? partitions : ""; *at; at += strcspn(at, ",")) {
		char name[65];

		at += *at == ',';
		if (listed(config->elastic, at, strcspn(at, ",")))
			continue;
		snprintf(name, sizeof(name), "%.*s", (int)strcspn(at, ","), at);
		snprintf(why, why_size, CKPTLESS_NOT_IN, name, config->elastic);
		return false;
	}
	return true;
}

bool ckptless_config_parse(int argc, char **argv, struct ckptless_config *config, const char **unknown)
{
	*config = (struct ckptless_config){ .socket = CKPTLESS_SOCKET, .launcher = CKPTLESS_LAUNCHER };
	for (int i = 0; i < argc; i++) {
		if (set(config, argv[i]))
			continue;
		*unknown = argv[i];
		return false;
	}
	return true;
}

/* plugstack.conf: optional .../ckptless_spank.so [socket=PATH] [launcher=PATH] */
#include "config.h"

#include <stddef.h>
#include <string.h>

static const struct {
	const char *key;
	size_t offset;
} keys[] = {
	{ "socket=", offsetof(struct ckptless_config, socket) },
	{ "launcher=", offsetof(struct ckptless_config, launcher) },
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

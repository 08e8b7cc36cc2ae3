/* Finds our options, -N and --no-kill among a command's words, and where the program begins. */
#include "cmdline.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Slurm's options that never take the next word as their value, those with an optional value included. */
static const char *const flags[] = {
	"bell", "ckptless", "compress", "contiguous", "disable-status", "exact", "exclusive",
	"get-user-env", "help", "hold", "ignore-pbs", "immediate", "kill-command", "kill-on-bad-exit",
	"label", "multi-prog", "nice", "no-allocate", "no-bell", "no-kill", "no-requeue", "no-shell",
	"overcommit", "overlap", "oversubscribe", "parsable", "preserve-env", "propagate", "pty",
	"quiet", "quit-on-interrupt", "reboot", "requeue", "resv-ports", "send-libs", "share",
	"spread-job", "test-only", "unbuffered", "usage", "use-min-nodes", "verbose", "version",
	"whole",
};

static const char short_flags[] = "EHIKOQVXZhklsuv";
static const char short_flags_with_value[] = "IKk"; /* in the same word only */

/* Slurm takes any unambiguous beginning of a name, so a beginning of a flag is that flag. */
static bool is_flag(const char *name, size_t size, enum ckptless_command command)
{
	if (size == 4 && !memcmp(name, "wait", 4))
		return command == CKPTLESS_SBATCH; /* srun --wait takes seconds */
	for (size_t i = 0; i < sizeof(flags) / sizeof(*flags); i++) {
		if (!strncmp(flags[i], name, size))
			return true;
	}
	return false;
}

static bool is_short_flag(char c, enum ckptless_command command)
{
	return (c && strchr(short_flags, c)) || (c == 'W' && command == CKPTLESS_SBATCH);
}

/* "4", "2-4": 4. Anything else Slurm may make something of, but not we: -1. */
static void note_nodes(struct ckptless_cmdline *said, const char *text)
{
	char *end;
	long low;

	said->nodes = -1;
	said->fewer = false;
	if (*text < '0' || *text > '9')
		return;
	low = said->nodes = strtol(text, &end, 10);
	if (*end == '-' && end[1] >= '0' && end[1] <= '9') {
		said->nodes = strtol(end + 1, &end, 10);
		said->fewer = low != said->nodes;
	}
	if (*end != '\0')
		said->nodes = -1;
}

static void note_long(struct ckptless_cmdline *said, const char *name, size_t size, const char *value)
{
	if (size == 8 && !memcmp(name, "ckptless", 8))
		said->spec = value ? value : "";
	else if (size == 5 && !memcmp(name, "nodes", 5))
		note_nodes(said, value ? value : "");
	else if (size >= 4 && size <= 9 && !memcmp(name, "partition", size))
		said->partition = value;
	else if (size >= 2 && size <= 5 && !memcmp(name, "array", size))
		said->array = true;
	else if (size >= 4 && size <= 7 && !memcmp(name, "no-kill", size))
		said->no_kill = value ? value : "";
}

/* One word of short options ("-HN2"). Returns whether the last of them takes the next word. */
static bool scan_short(const char *word, const char *next, enum ckptless_command command,
		       struct ckptless_cmdline *said)
{
	for (const char *c = word + 1; *c; c++) {
		if (is_short_flag(*c, command)) {
			if (*c == 'k')
				said->no_kill = c + 1;
			if (strchr(short_flags_with_value, *c))
				return false;
			continue;
		}
		if (*c == 'N')
			note_nodes(said, c[1] ? c + 1 : next ? next : "");
		if (*c == 'p')
			said->partition = c[1] ? c + 1 : next;
		if (*c == 'a' && command == CKPTLESS_SBATCH)
			said->array = true;
		return c[1] == '\0';
	}
	return false;
}

void ckptless_cmdline_scan(const char *const *words, size_t count, enum ckptless_command command,
			   struct ckptless_cmdline *said)
{
	*said = (struct ckptless_cmdline){ 0 };
	for (size_t i = 0; i < count; i++) {
		const char *word = words[i];
		const char *next = i + 1 < count ? words[i + 1] : NULL;
		const char *name = word + 2;
		size_t size;

		if (!strcmp(word, ":")) {
			said->het = true;
			continue;
		}
		if (word[0] != '-' || word[1] == '\0') {
			said->program = word;
			/* each component of srun has a program, and a ":" among its arguments ends it */
			for (; command == CKPTLESS_SRUN && i < count; i++)
				said->het |= !strcmp(words[i], ":");
			return;
		}
		if (word[1] != '-') {
			i += scan_short(word, next, command, said);
			continue;
		}
		if (*name == '\0') { /* "--": the options end here */
			said->program = next;
			return;
		}
		size = strcspn(name, "=");
		if (name[size] == '=') {
			note_long(said, name, size, name + size + 1);
		} else if (is_flag(name, size, command)) {
			note_long(said, name, size, NULL);
		} else {
			/* a flag of another plugin, rather than one of Slurm's options with such a value */
			bool takes = next && next[0] != '-';

			note_long(said, name, size, takes ? next : NULL);
			i += takes;
		}
	}
}

/* Reads a batch script's #SBATCH lines: they reach a plugin only as options of its own, -N does not. */
#include "script.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_WORDS 512

/*
 * Cuts the first word off `line`, with quotes and backslashes as sbatch takes them, in place.
 * NULL at the end of the line or at a comment. `*rest` is where to go on.
 */
static char *cut_word(char *line, char **rest)
{
	char *from = line + strspn(line, " \t\r");
	char *word = from;
	char *to = from;
	char quote = '\0';

	if (*from == '\0' || *from == '#')
		return NULL;
	for (; *from; from++) {
		if (quote ? *from == quote : (*from == '"' || *from == '\''))
			quote = quote ? '\0' : *from;
		else if (*from == '\\' && from[1] && quote != '\'')
			*to++ = *++from;
		else if (!quote && strchr(" \t\r", *from))
			break;
		else
			*to++ = *from;
	}
	*rest = *from ? from + 1 : from;
	*to = '\0';
	return word;
}

void ckptless_script_scan(char *text, struct ckptless_cmdline *said)
{
	const char *words[MAX_WORDS];
	size_t count = 0;
	bool het = false;

	for (char *line = text; line;) {
		char *end = strchr(line, '\n');
		char *next = end ? end + 1 : NULL;
		char *word;

		if (end)
			*end = '\0';
		if (!strncmp(line, "#SBATCH", 7) && strchr(" \t", line[7])) {
			for (char *rest = line + 7; count < MAX_WORDS && (word = cut_word(rest, &rest));) {
				if (!strcmp(word, "hetjob") || !strcmp(word, "packjob"))
					het = true;
				else
					words[count++] = word;
			}
		} else if (line[0] != '#' && line[strspn(line, " \t\r")] != '\0') {
			break;
		}
		line = next;
	}
	ckptless_cmdline_scan(words, count, CKPTLESS_SBATCH, said);
	said->het = het;
}

bool ckptless_script_read(const char *path, char *text)
{
	struct stat status;
	ssize_t size = -1;
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);

	if (fd < 0)
		return false;
	if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode))
		size = read(fd, text, CKPTLESS_SCRIPT_SIZE - 1);
	close(fd);
	if (size < 0)
		return false;
	text[size] = '\0';
	return true;
}

/* A plugin is not given its host's arguments; /proc has them. */
#include "words.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#define MAX_BYTES 65536
#define MAX_WORDS 2048 /* options come first; of what follows nothing is needed */

void ckptless_cmdline_own(enum ckptless_command command, struct ckptless_cmdline *said)
{
	static char text[MAX_BYTES];
	const char *words[MAX_WORDS];
	size_t size = 0, count = 0;
	ssize_t n;
	int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);

	*said = (struct ckptless_cmdline){ 0 };
	if (fd < 0)
		return;
	while (size < sizeof(text) - 1 && (n = read(fd, text + size, sizeof(text) - 1 - size)) > 0)
		size += (size_t)n;
	close(fd);
	text[size] = '\0';
	for (const char *word = text; word < text + size && count < MAX_WORDS; word += strlen(word) + 1)
		words[count++] = word;
	if (count)
		ckptless_cmdline_scan(words + 1, count - 1, command, said);
}

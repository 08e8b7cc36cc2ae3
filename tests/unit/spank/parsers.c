/*
 * Drives the pure parts of the SPANK plugin: for tests in Python, and with random input.
 *
 *   parsers                     requests on stdin, one a line, fields parted by tabs; one line back for each
 *   parsers fuzz SEED ROUNDS    random input, checked against what must always hold; for sanitizers as well
 */
#define _GNU_SOURCE
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cmdline.h"
#include "config.h"
#include "environment.h"
#include "notify.h"
#include "options.h"
#include "script.h"

#define MAX_FIELDS 256

static const char *shown(const char *text)
{
	return text ? text : "-";
}

static void answer_spec(char **field)
{
	struct ckptless_spec spec;
	char text[CKPTLESS_SPEC_SIZE], why[CKPTLESS_WHY_SIZE];

	if (!ckptless_spec_parse(strcmp(field[0], "NULL") ? field[0] : NULL, &spec, why, sizeof(why))) {
		printf("refused\t%s\n", why);
		return;
	}
	ckptless_spec_format(&spec, text);
	printf("ok\t%s\n", text);
}

/* fits  SPEC  nodes  ["at most"] */
static void answer_fits(char **field)
{
	struct ckptless_spec spec;
	char why[CKPTLESS_WHY_SIZE];

	if (!ckptless_spec_parse(field[0], &spec, why, sizeof(why)))
		abort();
	if (ckptless_fits(&spec, atol(field[1]), !field[2][0], why, sizeof(why)))
		printf("ok\n");
	else
		printf("refused\t%s\n", why);
}

static void answer_said(const struct ckptless_cmdline *said)
{
	printf("%s\t%s\t%s\t%ld\t%d\t%d\t%s\t%d\n", shown(said->spec), shown(said->no_kill), shown(said->program),
	       said->nodes, said->het, said->fewer, shown(said->partition), said->array);
}

static enum ckptless_command command(const char *name)
{
	return !strcmp(name, "srun") ? CKPTLESS_SRUN : !strcmp(name, "salloc") ? CKPTLESS_SALLOC : CKPTLESS_SBATCH;
}

static void answer_script(const char *path)
{
	static char text[CKPTLESS_SCRIPT_SIZE];
	struct ckptless_cmdline said = { 0 };

	if (!ckptless_script_read(path, text)) {
		printf("unreadable\n");
		return;
	}
	ckptless_script_scan(text, &said);
	answer_said(&said);
}

static void answer_frame(char **field)
{
	struct ckptless_notice notice = { .ended = !strcmp(field[0], "JobEnded"),
					  .job_id = (uint32_t)strtoul(field[1], NULL, 10),
					  .uid = (uint32_t)strtoul(field[2], NULL, 10),
					  .spec = field[3] };
	unsigned char frame[CKPTLESS_FRAME_SIZE];
	size_t size = ckptless_notice_encode(&notice, frame);

	for (size_t i = 0; i < size; i++)
		printf("%02x", frame[i]);
	printf("\n");
}

static void answer_variables(char **field)
{
	struct ckptless_variable variables[CKPTLESS_VARIABLES];
	struct ckptless_spec spec;
	char why[CKPTLESS_WHY_SIZE];

	if (!ckptless_spec_parse(field[0], &spec, why, sizeof(why)))
		abort();
	ckptless_variables(&spec, variables);
	for (size_t i = 0; i < CKPTLESS_VARIABLES; i++) {
		if (variables[i].given)
			printf("%s=%s\t", variables[i].name, variables[i].value);
	}
	printf("\n");
}

static void answer_config(char **field, size_t count)
{
	struct ckptless_config config;
	const char *unknown = NULL;

	if (ckptless_config_parse((int)count, field, &config, &unknown))
		printf("ok\t%s\t%s\t%s\n", config.socket, config.launcher, shown(config.elastic));
	else
		printf("refused\t%s\n", unknown);
}

/* allowed  elastic=...  partitions, or NULL */
static void answer_allowed(char **field)
{
	struct ckptless_config config;
	const char *unknown, *partitions = strcmp(field[1], "NULL") ? field[1] : NULL;
	char why[CKPTLESS_WHY_SIZE];

	if (!ckptless_config_parse(field[0][0] ? 1 : 0, field, &config, &unknown))
		abort();
	if (ckptless_elastic_allowed(&config, partitions, why, sizeof(why)))
		printf("ok\n");
	else
		printf("refused\t%s\n", why);
}

static void answer(char *line)
{
	char *field[MAX_FIELDS];
	size_t count = 0;

	line[strcspn(line, "\n")] = '\0';
	while (count < MAX_FIELDS && line)
		field[count++] = strsep(&line, "\t");
	for (size_t i = count; i < MAX_FIELDS; i++)
		field[i] = "";
	if (!strcmp(field[0], "spec"))
		answer_spec(field + 1);
	else if (!strcmp(field[0], "fits"))
		answer_fits(field + 1);
	else if (!strcmp(field[0], "frame"))
		answer_frame(field + 1);
	else if (!strcmp(field[0], "script"))
		answer_script(field[1]);
	else if (!strcmp(field[0], "variables"))
		answer_variables(field + 1);
	else if (!strcmp(field[0], "config"))
		answer_config(field + 1, count - 1);
	else if (!strcmp(field[0], "allowed"))
		answer_allowed(field + 1);
	else if (!strcmp(field[0], "cmdline")) {
		struct ckptless_cmdline said;

		ckptless_cmdline_scan((const char *const *)field + 2, count - 2, command(field[1]), &said);
		answer_said(&said);
	} else
		abort();
	fflush(stdout);
}

/* ---- random input ---- */

static const char *const pieces[] = {
	"spares",  "replicas", "max-stall", "=",    ",",	   "1",	 "1024", "1025", "99999999999", "s",
	"m",	   "auto",     "off",	    "(null)",  "-",    "--",	   "\n", " ",	 "\t",	 "\"",		"'",
	"\\",	   "#SBATCH ", "#",	    "-N",      "-N2",  "--nodes=", "2-", "k",	 "-HN",	 "--ckptless",	"=1",
	"bandwidth", "interface", "MB/s", "none", "GiB/s", "/16",
	"min-nodes=", "max-nodes=", "step=", "sizes=", "scale-up-after=", "2", "4", "2:4:8", "65536", "-p",
	"draw-in=", "draw-in-patience=", "-a",
	"--no-kill", "a.sh",   ".",	    "_",       "\x80", "\xff",	   ":",	 "x",	 "60",
};

/* A malloc'd text of random pieces and bytes: its end is then one that a sanitizer watches. */
static char *random_text(size_t most)
{
	char text[4096];
	size_t size = 0;
	size_t count = (size_t)rand() % most;

	while (count--) {
		const char *piece = pieces[(size_t)rand() % (sizeof(pieces) / sizeof(*pieces))];

		if (size + 16 > sizeof(text))
			break;
		if (rand() % 8 == 0)
			text[size++] = (char)(1 + rand() % 255);
		else
			size += (size_t)sprintf(text + size, "%s", piece);
	}
	text[size] = '\0';
	return strdup(text);
}

static void check_sentence(const char *why)
{
	size_t size = strnlen(why, CKPTLESS_WHY_SIZE);

	assert(size > 10 && size < CKPTLESS_WHY_SIZE);
	for (size_t i = 0; i < size; i++)
		assert(why[i] >= ' ' && why[i] <= '~');
}

static void fuzz_spec(void)
{
	char *text = random_text(12);
	char written[CKPTLESS_SPEC_SIZE], again[CKPTLESS_SPEC_SIZE], why[CKPTLESS_WHY_SIZE] = "";
	struct ckptless_spec spec, same;

	if (ckptless_spec_parse(text, &spec, why, sizeof(why))) {
		ckptless_spec_format(&spec, written);
		assert(strlen(written) < CKPTLESS_SPEC_SIZE);
		assert(ckptless_spec_parse(written, &same, why, sizeof(why)));
		ckptless_spec_format(&same, again);
		assert(!strcmp(written, again));
		if (!ckptless_elastic(&spec)) {
			assert(ckptless_fits(&spec, 1025, true, why, sizeof(why)));
			assert(!spec.on || ckptless_fits(&spec, 1, true, why, sizeof(why)) == (spec.spares < 1));
		} else if (!ckptless_fits(&spec, 1 + rand() % 9, rand() % 2, why, sizeof(why))) {
			check_sentence(why);
		}
	} else {
		check_sentence(why);
	}
	free(text);
}

static void fuzz_cmdline(void)
{
	char *words[12];
	size_t count = (size_t)rand() % 12;
	struct ckptless_cmdline said;

	for (size_t i = 0; i < count; i++)
		words[i] = random_text(4);
	ckptless_cmdline_scan((const char *const *)words, count, (enum ckptless_command)(rand() % 3), &said);
	assert(said.nodes >= -1);
	assert(!said.program || strlen(said.program) < 4096);
	for (size_t i = 0; i < count; i++)
		free(words[i]);
}

static void fuzz_script(void)
{
	char *text = random_text(200);
	struct ckptless_cmdline said;

	ckptless_script_scan(text, &said);
	assert(!said.spec || strlen(said.spec) < 4096);
	free(text);
}

static void fuzz_frame(void)
{
	char *text = random_text(60);
	struct ckptless_notice notice = { .ended = rand() % 2,
					  .job_id = (uint32_t)rand() * 2u,
					  .uid = (uint32_t)rand() * 2u,
					  .spec = text };
	unsigned char *frame = malloc(CKPTLESS_FRAME_SIZE);
	size_t size = ckptless_notice_encode(&notice, frame);

	assert(size <= CKPTLESS_FRAME_SIZE);
	assert(size == 0 || size == 4u + frame[0] + 256u * frame[1]);
	assert(size > 0 || strlen(text) >= CKPTLESS_SPEC_SIZE);
	free(frame);
	free(text);
}

int main(int argc, char **argv)
{
	char *line = NULL;
	size_t size = 0;

	if (argc == 4 && !strcmp(argv[1], "fuzz")) {
		srand((unsigned)atoi(argv[2]));
		for (long i = atol(argv[3]); i > 0; i--) {
			fuzz_spec();
			fuzz_cmdline();
			fuzz_script();
			fuzz_frame();
		}
		printf("%s rounds of random input: as it should be\n", argv[3]);
		return 0;
	}
	while (getline(&line, &size, stdin) > 0)
		answer(line);
	free(line);
	return 0;
}

/* The grammar of SPEC, and what contradicts what. */
#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

static bool is_name_char(char c)
{
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || is_digit(c) || c == '_' || c == '-' ||
	       c == '.';
}

/* The whole number at the start of `text`, which is `size` bytes long; -1 if there is none or it is huge. */
static int leading_number(const char *text, size_t size, size_t *used)
{
	int value = 0;
	size_t i = 0;

	while (i < size && is_digit(text[i])) {
		if (i == 7)
			return -1;
		value = value * 10 + (text[i] - '0');
		i++;
	}
	*used = i;
	return i ? value : -1;
}

static bool bounded(const char *text, size_t size, int low, int high, int *out)
{
	size_t used = 0;
	int value = leading_number(text, size, &used);

	if (value < low || value > high || used != size)
		return false;
	*out = value;
	return true;
}

static bool duration_s(const char *text, size_t size, int low, int high, int *out)
{
	size_t used = 0;
	int value = leading_number(text, size, &used);

	if (value < 0)
		return false;
	if (used + 1 == size && text[used] == 'm')
		value *= 60; /* at most 7 digits: no overflow */
	else if (used != size && !(used + 1 == size && text[used] == 's'))
		return false;
	if (value < low || value > high)
		return false;
	*out = value;
	return true;
}

static bool same(const char *text, size_t size, const char *word)
{
	return strlen(word) == size && memcmp(text, word, size) == 0;
}

/* "500MB/s": a number and a unit; or "none". */
static bool rate(const char *text, size_t size, char *out)
{
	static const struct {
		const char *unit;
		double factor;
	} units[] = { { "B/s", 1 },	 { "kB/s", 1e3 },    { "MB/s", 1e6 },	  { "GB/s", 1e9 },
		      { "KiB/s", 1024 }, { "MiB/s", 1 << 20 }, { "GiB/s", 1 << 30 } };
	double value = 0, place = 1;
	size_t used = 0;

	if (size >= CKPTLESS_BANDWIDTH_SIZE)
		return false;
	if (!same(text, size, "none")) {
		for (; used < size && is_digit(text[used]); used++)
			value = value * 10 + (text[used] - '0');
		if (used == 0)
			return false;
		if (used + 1 < size && text[used] == '.' && is_digit(text[used + 1])) {
			for (used++; used < size && is_digit(text[used]); used++)
				value += (text[used] - '0') * (place /= 10);
		}
		for (size_t i = 0; i < sizeof(units) / sizeof(*units); i++) {
			if (same(text + used, size - used, units[i].unit)) {
				value *= units[i].factor;
				used = size;
				break;
			}
		}
		if (used != size || value < CKPTLESS_BANDWIDTH_LOW || value > CKPTLESS_BANDWIDTH_HIGH)
			return false;
	}
	memcpy(out, text, size);
	out[size] = '\0';
	return true;
}

/* Interfaces or networks, joined by +; whether a node has it is found out there. */
static bool interface_name(const char *text, size_t size, char *out)
{
	if (size == 0 || size >= CKPTLESS_INTERFACE_SIZE || text[0] == '-')
		return false;
	for (size_t i = 0; i < size; i++) {
		if (!is_name_char(text[i]) && !strchr(":/@+", text[i]))
			return false;
	}
	memcpy(out, text, size);
	out[size] = '\0';
	return true;
}

/* "4:8:12" */
static bool sizes(const char *text, size_t size, char *out)
{
	int last = 0, count = 0;

	for (size_t at = 0; at <= size; at++) {
		size_t used = 0;
		int value = leading_number(text + at, size - at, &used);

		if (used > 5 || value <= last || value > CKPTLESS_MAX_NODES_HIGH || ++count > CKPTLESS_SIZES_MOST)
			return false;
		last = value;
		at += used;
		if (at < size && text[at] != ':')
			return false;
	}
	memcpy(out, text, size);
	out[size] = '\0';
	return true;
}

/* A user's text as it may stand in a message: short, and nothing in it that a terminal would act on. */
static const char *shown(const char *text, size_t size, char out[49])
{
	size_t n = size < 48 ? size : 48;

	for (size_t i = 0; i < n; i++)
		out[i] = (text[i] >= ' ' && text[i] <= '~') ? text[i] : '?';
	out[n] = '\0';
	return out;
}

#define AT(field) offsetof(struct ckptless_spec, field)
#define BOUNDS(name) CKPTLESS_##name##_LOW, CKPTLESS_##name##_HIGH

static const struct {
	const char *word;
	size_t at;
	int low, high;
	bool (*read)(const char *text, size_t size, int low, int high, int *out);
	const char *wants;
} numbers[] = {
	{ "spares", AT(spares), BOUNDS(SPARES), bounded, "a number from " CKPTLESS_SPARES_RANGE },
	{ "min-nodes", AT(min_nodes), BOUNDS(MIN_NODES), bounded, "a number from " CKPTLESS_MIN_NODES_RANGE },
	{ "max-nodes", AT(max_nodes), BOUNDS(MAX_NODES), bounded, "a number from " CKPTLESS_MAX_NODES_RANGE },
	{ "step", AT(step), BOUNDS(STEP), bounded, "a number from " CKPTLESS_STEP_RANGE },
	{ "scale-up-after", AT(grow_after_s), BOUNDS(SCALE_UP_AFTER), duration_s,
	  CKPTLESS_SCALE_UP_AFTER_RANGE ", or minutes as in 2m" },
	{ "scale-timeout", AT(scale_timeout_s), BOUNDS(SCALE_TIMEOUT), duration_s,
	  CKPTLESS_SCALE_TIMEOUT_RANGE ", or minutes as in 2m" },
	{ "graceful", AT(graceful_s), BOUNDS(GRACEFUL), duration_s, CKPTLESS_GRACEFUL_RANGE ", or minutes as in 2m" },
	{ "draw-in", AT(draw_in), BOUNDS(DRAW_IN), bounded, "a number from " CKPTLESS_DRAW_IN_RANGE },
	{ "draw-in-patience", AT(draw_in_patience_s), BOUNDS(DRAW_IN_PATIENCE), duration_s,
	  CKPTLESS_DRAW_IN_PATIENCE_RANGE ", or minutes as in 2m" },
	{ "replicas", AT(replicas), BOUNDS(REPLICAS), bounded, "a number from " CKPTLESS_REPLICAS_RANGE },
	{ "max-stall", AT(max_stall_s), BOUNDS(MAX_STALL), duration_s,
	  CKPTLESS_MAX_STALL_RANGE ", or minutes as in 2m" },
};

static const struct {
	const char *word;
	size_t at;
	bool (*read)(const char *text, size_t size, char *out);
	const char *wants;
} texts[] = {
	{ "sizes", AT(sizes), sizes, CKPTLESS_SIZES_WANTED },
	{ "bandwidth", AT(bandwidth), rate, CKPTLESS_BANDWIDTH_RANGE ", as in 500MB/s, or none" },
	{ "interface", AT(interface), interface_name, "interfaces or networks, as in ib0+ib1" },
};

#define COUNT(table) (sizeof(table) / sizeof(*(table)))

static bool setting_parse(const char *item, size_t size, struct ckptless_spec *spec, char *why, size_t why_size)
{
	char word[49];
	const char *equals = memchr(item, '=', size);
	size_t key = equals ? (size_t)(equals - item) : size;
	const char *value = equals ? equals + 1 : item + size;
	size_t rest = equals ? size - key - 1 : 0;
	bool known = false, again = false;
	const char *want = NULL;

	for (size_t i = 0; i < COUNT(numbers) && !known; i++) {
		int *out = (int *)((char *)spec + numbers[i].at);

		if (!(known = same(item, key, numbers[i].word)))
			continue;
		again = *out != CKPTLESS_NOT_SAID;
		want = numbers[i].read(value, rest, numbers[i].low, numbers[i].high, out) ? NULL : numbers[i].wants;
	}
	for (size_t i = 0; i < COUNT(texts) && !known; i++) {
		char *out = (char *)spec + texts[i].at;

		if (!(known = same(item, key, texts[i].word)))
			continue;
		again = out[0] != '\0';
		want = texts[i].read(value, rest, out) ? NULL : texts[i].wants;
	}
	if (!known)
		snprintf(why, why_size,
			 "\"%s\" is not known; say auto, off, or a list of "
			 "spares=N, min-nodes=N, max-nodes=N, step=N, sizes=N:N, scale-up-after=N[s|m], "
			 "scale-timeout=N[s|m], graceful=N[s|m], draw-in=N, draw-in-patience=N[s|m], replicas=N, "
			 "max-stall=N[s|m], bandwidth=RATE, interface=NAME",
			 shown(item, size, word));
	else if (want)
		snprintf(why, why_size, "\"%s\" is not valid; %.*s wants %s", shown(item, size, word), (int)key, item,
			 want);
	else if (again)
		snprintf(why, why_size, "%.*s is given twice; say it once", (int)key, item);
	return known && !want && !again;
}

bool ckptless_spec_parse(const char *text, struct ckptless_spec *spec, char *why, size_t why_size)
{
	*spec = (struct ckptless_spec){ .on = true };
	for (size_t i = 0; i < COUNT(numbers); i++)
		*(int *)((char *)spec + numbers[i].at) = CKPTLESS_NOT_SAID;
	if (!text || !*text || !strcmp(text, "(null)") || !strcmp(text, "auto"))
		return true;
	if (!strcmp(text, "off")) {
		spec->on = false;
		return true;
	}
	for (const char *item = text;; item++) {
		size_t size = strcspn(item, ",");

		if (!setting_parse(item, size, spec, why, why_size))
			return false;
		item += size;
		if (!*item)
			return true;
	}
}

void ckptless_spec_format(const struct ckptless_spec *spec, char *text)
{
	size_t at = 0;

	text[0] = '\0';
	if (!spec->on) {
		strcpy(text, "off");
		return;
	}
	for (size_t i = 0; i < COUNT(numbers); i++) {
		int value = *(const int *)((const char *)spec + numbers[i].at);

		if (value != CKPTLESS_NOT_SAID)
			at += (size_t)sprintf(text + at, ",%s=%d", numbers[i].word, value);
	}
	for (size_t i = 0; i < COUNT(texts); i++) {
		const char *value = (const char *)spec + texts[i].at;

		if (value[0])
			at += (size_t)sprintf(text + at, ",%s=%s", texts[i].word, value);
	}
	if (at == 0)
		strcpy(text, "auto");
	else
		memmove(text, text + 1, at); /* the first comma goes, the NUL comes along */
}

static const char *s(long count)
{
	return count == 1 ? "" : "s";
}

bool ckptless_elastic(const struct ckptless_spec *spec)
{
	return spec->on &&
	       (spec->sizes[0] || spec->min_nodes != CKPTLESS_NOT_SAID || spec->max_nodes != CKPTLESS_NOT_SAID);
}

bool ckptless_draws(const struct ckptless_spec *spec)
{
	return spec->on && spec->draw_in > 0; /* CKPTLESS_NOT_SAID is below */
}

/* Whether `nodes` is one of the sizes as they are written; the largest of them is `*most`. */
static bool is_a_size(const char *text, long nodes, long *most)
{
	bool found = false;

	for (char *end; *text; text = *end ? end + 1 : end) {
		*most = strtol(text, &end, 10);
		found |= *most == nodes;
	}
	return found;
}

/* The same for a least and a most, in words for what is wrong with one of them. */
static bool bound_fits(const char *word, long bound, long step, long nodes, char *why, size_t why_size)
{
	bool is_least = !strcmp(word, "min-nodes");

	if (is_least ? bound > nodes : bound < nodes)
		snprintf(why, why_size, CKPTLESS_OUTSIDE, word, bound, is_least ? "more" : "less", nodes, s(nodes));
	else if ((bound - nodes) % step)
		snprintf(why, why_size, CKPTLESS_NOT_WHOLE, nodes, s(nodes), step, word, bound);
	else
		return true;
	return false;
}

/* Of a job that trains on `nodes` nodes; 0: not known. The rules, and their order, are settings/elastic.py's. */
static bool sizes_fit(const struct ckptless_spec *spec, long nodes, long spares, char *why, size_t why_size)
{
	bool least_said = spec->min_nodes != CKPTLESS_NOT_SAID, most_said = spec->max_nodes != CKPTLESS_NOT_SAID;
	long least = least_said ? spec->min_nodes : nodes, most = most_said ? spec->max_nodes : nodes;
	long step = spec->step != CKPTLESS_NOT_SAID ? spec->step : 1;
	long late = ckptless_draws(spec) ? spec->draw_in : 0;

	if (spec->sizes[0] && (least_said || most_said || spec->step != CKPTLESS_NOT_SAID)) {
		snprintf(why, why_size, CKPTLESS_BOTH_WAYS);
		return false;
	}
	if (least_said && most_said && least > most) {
		snprintf(why, why_size, CKPTLESS_UPSIDE_DOWN, least, most);
		return false;
	}
	if (nodes == 0)
		return true;
	if (spec->sizes[0] && !is_a_size(spec->sizes, nodes, &most)) {
		snprintf(why, why_size, CKPTLESS_NOT_A_SIZE, nodes, s(nodes), spec->sizes);
		return false;
	}
	if (!spec->sizes[0] && (!bound_fits("min-nodes", least, step, nodes, why, why_size) ||
				!bound_fits("max-nodes", most, step, nodes, why, why_size)))
		return false;
	if (!spec->sizes[0] && (most - least) / step >= CKPTLESS_MOST_SIZES) {
		snprintf(why, why_size, CKPTLESS_TOO_MANY, least, most, (long)CKPTLESS_MOST_SIZES);
		return false;
	}
	if (most > nodes + spares + late) {
		snprintf(why, why_size, CKPTLESS_NO_ROOM, most, nodes, spares, s(spares), late);
		return false;
	}
	return true;
}

bool ckptless_fits(const struct ckptless_spec *spec, long nodes, bool exactly, char *why, size_t why_size)
{
	long spares = spec->spares == CKPTLESS_NOT_SAID ? 0 : spec->spares;

	if (!spec->on)
		return true;
	if (nodes > 0 && spares >= nodes) {
		snprintf(why, why_size, CKPTLESS_NONE_LEFT, spares, s(spares), nodes, s(nodes));
		return false;
	}
	return !ckptless_elastic(spec) || sizes_fit(spec, nodes > 0 && exactly ? nodes - spares : 0, spares, why, why_size);
}

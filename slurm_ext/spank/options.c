/* The grammar of SPEC, and what contradicts what. */
#include "options.h"

#include <stdio.h>
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

static bool duration_s(const char *text, size_t size, int *out)
{
	size_t used = 0;
	int value = leading_number(text, size, &used);

	if (value < 0)
		return false;
	if (used + 1 == size && text[used] == 'm')
		value *= 60; /* at most 7 digits: no overflow */
	else if (used != size && !(used + 1 == size && text[used] == 's'))
		return false;
	if (value < CKPTLESS_MAX_STALL_LOW || value > CKPTLESS_MAX_STALL_HIGH)
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

/* A user's text as it may stand in a message: short, and nothing in it that a terminal would act on. */
static const char *shown(const char *text, size_t size, char out[49])
{
	size_t n = size < 48 ? size : 48;

	for (size_t i = 0; i < n; i++)
		out[i] = (text[i] >= ' ' && text[i] <= '~') ? text[i] : '?';
	out[n] = '\0';
	return out;
}

static bool setting_parse(const char *item, size_t size, struct ckptless_spec *spec, char *why, size_t why_size)
{
	char word[49];
	const char *equals = memchr(item, '=', size);
	size_t key = equals ? (size_t)(equals - item) : size;
	const char *value = equals ? equals + 1 : item + size;
	size_t rest = equals ? size - key - 1 : 0;
	bool again = false;
	const char *want;

	if (same(item, key, "spares")) {
		again = spec->spares != CKPTLESS_NOT_SAID;
		want = bounded(value, rest, CKPTLESS_SPARES_LOW, CKPTLESS_SPARES_HIGH, &spec->spares)
			       ? NULL : "a number from " CKPTLESS_SPARES_RANGE;
	} else if (same(item, key, "replicas")) {
		again = spec->replicas != CKPTLESS_NOT_SAID;
		want = bounded(value, rest, CKPTLESS_REPLICAS_LOW, CKPTLESS_REPLICAS_HIGH, &spec->replicas)
			       ? NULL : "a number from " CKPTLESS_REPLICAS_RANGE;
	} else if (same(item, key, "max-stall")) {
		again = spec->max_stall_s != CKPTLESS_NOT_SAID;
		want = duration_s(value, rest, &spec->max_stall_s) ? NULL : CKPTLESS_MAX_STALL_RANGE ", or minutes as in 2m";
	} else if (same(item, key, "bandwidth")) {
		again = spec->bandwidth[0] != '\0';
		want = rate(value, rest, spec->bandwidth) ? NULL : CKPTLESS_BANDWIDTH_RANGE ", as in 500MB/s, or none";
	} else if (same(item, key, "interface")) {
		again = spec->interface[0] != '\0';
		want = interface_name(value, rest, spec->interface) ? NULL : "interfaces or networks, as in ib0+ib1";
	} else {
		snprintf(why, why_size,
			 "\"%s\" is not known; say auto, off, or a list of "
			 "spares=N, replicas=N, max-stall=N[s|m], bandwidth=RATE, interface=NAME",
			 shown(item, size, word));
		return false;
	}
	if (want) {
		snprintf(why, why_size, "\"%s\" is not valid; %.*s wants %s",
			 shown(item, size, word), (int)key, item, want);
		return false;
	}
	if (again) {
		snprintf(why, why_size, "%.*s is given twice; say it once", (int)key, item);
		return false;
	}
	return true;
}

bool ckptless_spec_parse(const char *text, struct ckptless_spec *spec, char *why, size_t why_size)
{
	*spec = (struct ckptless_spec){ .on = true,
					.spares = CKPTLESS_NOT_SAID,
					.replicas = CKPTLESS_NOT_SAID,
					.max_stall_s = CKPTLESS_NOT_SAID };
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
	if (spec->spares != CKPTLESS_NOT_SAID)
		at += (size_t)sprintf(text + at, ",spares=%d", spec->spares);
	if (spec->replicas != CKPTLESS_NOT_SAID)
		at += (size_t)sprintf(text + at, ",replicas=%d", spec->replicas);
	if (spec->max_stall_s != CKPTLESS_NOT_SAID)
		at += (size_t)sprintf(text + at, ",max-stall=%d", spec->max_stall_s);
	if (spec->bandwidth[0])
		at += (size_t)sprintf(text + at, ",bandwidth=%s", spec->bandwidth);
	if (spec->interface[0])
		at += (size_t)sprintf(text + at, ",interface=%s", spec->interface);
	if (at == 0)
		strcpy(text, "auto");
	else
		memmove(text, text + 1, at); /* the first comma goes, the NUL comes along */
}

bool ckptless_fits(const struct ckptless_spec *spec, long nodes, char *why, size_t why_size)
{
	if (!spec->on || nodes <= 0 || spec->spares < nodes)
		return true;
	snprintf(why, why_size, CKPTLESS_NONE_LEFT, spec->spares, spec->spares == 1 ? "" : "s", nodes,
		 nodes == 1 ? "" : "s");
	return false;
}

/* Spec to variables. A setting that was not given has no variable: the launcher's own default applies. */
#include "environment.h"

#include <stdio.h>

static void number(struct ckptless_variable *out, const char *name, int value)
{
	out->name = name;
	out->given = value != CKPTLESS_NOT_SAID;
	snprintf(out->value, sizeof(out->value), "%d", value);
}

static void words(struct ckptless_variable *out, const char *name, const char *value)
{
	out->name = name;
	out->given = value[0] != '\0';
	snprintf(out->value, sizeof(out->value), "%s", value);
}

void ckptless_variables(const struct ckptless_spec *spec, struct ckptless_variable out[CKPTLESS_VARIABLES])
{
	out[0] = (struct ckptless_variable){ .name = "CKPTLESS", .given = true };
	ckptless_spec_format(spec, out[0].value);
	out[1] = out[0];
	out[1].name = "CKPTLESS_SPEC";
	number(&out[2], "CKPTLESS_SPARES", spec->spares);
	number(&out[3], "CKPTLESS_REPLICAS", spec->replicas);
	number(&out[4], "CKPTLESS_MAX_STALL", spec->max_stall_s);
	words(&out[5], "CKPTLESS_BANDWIDTH", spec->bandwidth);
	words(&out[6], "CKPTLESS_INTERFACE", spec->interface);
	number(&out[7], "CKPTLESS_MIN_NODES", spec->min_nodes);
	number(&out[8], "CKPTLESS_MAX_NODES", spec->max_nodes);
	number(&out[9], "CKPTLESS_STEP", spec->step);
	words(&out[10], "CKPTLESS_SIZES", spec->sizes);
	number(&out[11], "CKPTLESS_SCALE_UP_AFTER", spec->grow_after_s);
	number(&out[12], "CKPTLESS_SCALE_TIMEOUT", spec->scale_timeout_s);
	number(&out[13], "CKPTLESS_GRACEFUL", spec->graceful_s);
	number(&out[14], "CKPTLESS_DRAW_IN", spec->draw_in);
	number(&out[15], "CKPTLESS_DRAW_IN_PATIENCE", spec->draw_in_patience_s);
}

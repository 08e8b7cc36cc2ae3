/* The job begins or ends on this node: the daemon is told, whatever it makes of it. */
#include "job_script.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "notify.h"
#include "options.h"

void ckptless_job_script(spank_t sp, const struct ckptless_config *config, bool ended)
{
	const char *asked = getenv("SPANK_CKPTLESS"); /* the user's word, so it is read like any other SPEC */
	char text[CKPTLESS_SPEC_SIZE] = "";
	char why[CKPTLESS_WHY_SIZE];
	struct ckptless_notice notice = { .ended = ended, .spec = text };
	struct ckptless_spec spec;
	const char *failed;
	uint32_t job_id;
	uid_t uid;

	if (!asked)
		return;
	if (ckptless_spec_parse(asked, &spec, why, sizeof(why))) {
		if (!spec.on)
			return;
		ckptless_spec_format(&spec, text);
	}
	if (spank_get_item(sp, S_JOB_ID, &job_id) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS) {
		slurm_error("ckptless: %s: Slurm does not say which job this is", ended ? "epilog" : "prolog");
		return;
	}
	notice.job_id = job_id;
	notice.uid = uid;
	failed = ckptless_notify(&notice, config->socket, CKPTLESS_NOTIFY_MS);
	if (failed)
		slurm_info("ckptless: %s of job %u: the daemon was not told: %s: %s: %s",
			   ended ? "epilog" : "prolog", job_id, config->socket, failed, strerror(errno));
}

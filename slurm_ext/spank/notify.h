/* Tells the node's daemon that a job begins or ends here. Never blocks past its deadline. */
#ifndef CKPTLESS_NOTIFY_H
#define CKPTLESS_NOTIFY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "options.h"

#define CKPTLESS_NOTIFY_MS 300
#define CKPTLESS_FRAME_SIZE (CKPTLESS_SPEC_SIZE + 80) /* 80: more than all the rest takes */

struct ckptless_notice {
	bool ended; /* JobEnded, else JobStarted */
	uint32_t job_id;
	uint32_t uid;
	const char *spec; /* as ckptless_spec_format writes it, or "" */
};

/*
 * Writes the frame: a length (u32, little endian) and a msgpack map of type, protocol, job_id, uid, spec.
 * Returns its size in bytes, at most CKPTLESS_FRAME_SIZE; 0 if the spec is too long.
 */
size_t ckptless_notice_encode(const struct ckptless_notice *notice, unsigned char *frame);

/*
 * Sends the notice and waits for the daemon to answer or hang up, so that it knows of the job before the job
 * begins; for all of it together `deadline_ms`. NULL: sent. Otherwise what failed, with errno set.
 */
const char *ckptless_notify(const struct ckptless_notice *notice, const char *socket_path, int deadline_ms);

#endif

/* One frame to the daemon's Unix socket; the few kinds of msgpack that it takes are written by hand. */
#include "notify.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define PROTOCOL 1
#define RETRY_MS 5

static unsigned char *put_uint(unsigned char *at, uint32_t value)
{
	if (value < 0x80) {
		*at++ = (unsigned char)value;
		return at;
	}
	int bytes = value <= 0xff ? 1 : value <= 0xffff ? 2 : 4;

	*at++ = bytes == 1 ? 0xcc : bytes == 2 ? 0xcd : 0xce;
	while (bytes--)
		*at++ = (unsigned char)(value >> (8 * bytes));
	return at;
}

/* `text` of less than CKPTLESS_SPEC_SIZE bytes */
static unsigned char *put_text(unsigned char *at, const char *text)
{
	size_t size = strlen(text);

	if (size > 0xff) {
		*at++ = 0xda;
		*at++ = (unsigned char)(size >> 8);
	} else if (size >= 32) {
		*at++ = 0xd9;
	}
	*at++ = (unsigned char)(size < 32 ? 0xa0 | size : size);
	memcpy(at, text, size);
	return at + size;
}

size_t ckptless_notice_encode(const struct ckptless_notice *notice, unsigned char *frame)
{
	unsigned char *at = frame + 4;
	uint32_t size;

	if (strlen(notice->spec) >= CKPTLESS_SPEC_SIZE)
		return 0;
	*at++ = 0x80 | 5; /* a map of five */
	at = put_text(put_text(at, "type"), notice->ended ? "JobEnded" : "JobStarted");
	at = put_uint(put_text(at, "protocol"), PROTOCOL);
	at = put_uint(put_text(at, "job_id"), notice->job_id);
	at = put_uint(put_text(at, "uid"), notice->uid);
	at = put_text(put_text(at, "spec"), notice->spec);
	size = (uint32_t)(at - frame - 4);
	for (int i = 0; i < 4; i++)
		frame[i] = (unsigned char)(size >> (8 * i));
	return (size_t)(at - frame);
}

static int64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Waits until `fd` is ready for `events`. False with errno at the deadline. */
static bool ready(int fd, short events, int64_t deadline)
{
	struct pollfd slot = { .fd = fd, .events = events };

	for (;;) {
		int64_t left = deadline - now_ms();
		int n = poll(&slot, 1, left > 0 ? (int)left : 0);

		if (n > 0)
			return true;
		if (n == 0)
			errno = ETIMEDOUT;
		if (n == 0 || errno != EINTR)
			return false;
	}
}

/* A full backlog gives no event to wait for (EAGAIN, unix(7)), so that is asked again until the deadline. */
static bool connected(int fd, const struct sockaddr_un *address, int64_t deadline)
{
	const struct timespec pause = { .tv_nsec = RETRY_MS * 1000000L };

	while (connect(fd, (const struct sockaddr *)address, sizeof(*address)) != 0) {
		if (errno != EAGAIN && errno != EINTR)
			return false;
		if (now_ms() + RETRY_MS > deadline) {
			errno = ETIMEDOUT;
			return false;
		}
		nanosleep(&pause, NULL);
	}
	return true;
}

static bool sent(int fd, const unsigned char *frame, size_t size, int64_t deadline)
{
	while (size) {
		ssize_t n = send(fd, frame, size, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (n > 0) {
			frame += n;
			size -= (size_t)n;
		} else if (errno == EAGAIN) {
			if (!ready(fd, POLLOUT, deadline))
				return false;
		} else if (errno != EINTR) {
			return false;
		}
	}
	return shutdown(fd, SHUT_WR) == 0;
}

const char *ckptless_notify(const struct ckptless_notice *notice, const char *socket_path, int deadline_ms)
{
	int64_t deadline = now_ms() + deadline_ms;
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	unsigned char frame[CKPTLESS_FRAME_SIZE];
	size_t size = ckptless_notice_encode(notice, frame);
	const char *failed = NULL;
	int fd, kept;

	if (!size || strlen(socket_path) >= sizeof(address.sun_path)) {
		errno = ENAMETOOLONG;
		return "encode";
	}
	strcpy(address.sun_path, socket_path);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return "socket";
	if (!connected(fd, &address, deadline))
		failed = "connect";
	else if (!sent(fd, frame, size, deadline))
		failed = "send";
	else if (!ready(fd, POLLIN, deadline))
		failed = "wait for the answer";
	kept = errno;
	close(fd);
	errno = kept;
	return failed;
}

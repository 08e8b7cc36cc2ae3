# Flags and places shared by all that make installs: the SPANK plugin, ckptless-notify, the job_submit plugin, etc.
# Included by a Makefile after it has set ROOT, the way to the top of the repository.
CC      ?= cc
BUILD   ?= $(ROOT)/build/$(notdir $(CURDIR))
INSTALL ?= install

PREFIX     ?= /usr
SYSCONFDIR ?= /etc
LIBEXECDIR ?= $(PREFIX)/libexec/ckptless
UNITDIR    ?= $(PREFIX)/lib/systemd/system
# Where pip, or a link, puts ckptlessd; the units say so.
BINDIR     ?= $(PREFIX)/bin
MANDIR     ?= $(PREFIX)/share/man
COMPDIR    ?= $(PREFIX)/share/bash-completion/completions
# Where Slurm looks for its plugins. Debian: slurm-wlm; RPM: slurm. `make PLUGINDIR=...` where neither fits.
PLUGINDIR  ?= $(or $(shell pkg-config --variable=plugindir slurm 2>/dev/null),$(firstword $(wildcard \
	/usr/lib/*/slurm-wlm /usr/lib/*/slurm /usr/lib64/slurm /usr/lib/slurm /opt/slurm/lib/slurm)))

# Slurm's headers where they are not on the compiler's own path: make SLURM_CPPFLAGS=-I/opt/slurm/include
SLURM_CPPFLAGS ?= $(shell pkg-config --cflags slurm 2>/dev/null)
CFLAGS  ?= -O2 -g
OUR_CPPFLAGS = -D_DEFAULT_SOURCE $(SLURM_CPPFLAGS)
OUR_CFLAGS   = -std=c11 -Wall -Wextra -Werror -fPIC
HARDENING    = -D_FORTIFY_SOURCE=2 -fstack-protector-strong -fstack-clash-protection
OUR_LDFLAGS  = -Wl,-z,relro,-z,now,-z,noexecstack
COMPILE = $(CC) $(OUR_CPPFLAGS) $(CPPFLAGS) $(OUR_CFLAGS) $(CFLAGS)

define need_plugindir
	@test -n '$(PLUGINDIR)' || { echo 'No plugin directory of Slurm was found: make install PLUGINDIR=DIR' >&2; exit 1; }
endef

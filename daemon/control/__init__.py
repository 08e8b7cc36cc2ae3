"""The control plane's pure core: inputs and time in, outputs out; no socket, no clock, no database."""

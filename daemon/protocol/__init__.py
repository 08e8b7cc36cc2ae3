"""The contract between processes: messages, framing, errors. The only part of daemon that hooks import."""

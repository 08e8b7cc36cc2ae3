"""What the commands share: options, where they read, the job that was asked for, tables and pictures."""

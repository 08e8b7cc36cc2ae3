"""The table of options, and what is read of it: the site's file, and the configuration of one daemon."""

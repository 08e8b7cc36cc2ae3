"""The way of torches before 2.14. To be deleted the day 2.14 is the oldest, with what only this uses."""

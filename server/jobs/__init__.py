"""Jobs: data and a recipe in, a version out. Queued durably, run in child processes, resumed after any crash."""

"""The Match3 task: data, options, report and registration."""

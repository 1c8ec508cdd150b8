"""What conversion costs and saves: data, answers before and after, time, a search for settings, and reports."""

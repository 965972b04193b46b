"""What a person schedules: one file per flow, and the `gradeloom` command."""

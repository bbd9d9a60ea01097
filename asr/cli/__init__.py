"""The `asr` command line: one file a command."""

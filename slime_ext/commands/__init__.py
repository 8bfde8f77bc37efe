"""Sub-commands around configurations: ``presets``, ``check``, ``convert``. Imported when they are called."""

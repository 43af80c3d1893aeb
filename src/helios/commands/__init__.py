"""The subcommands beside ``serve``: ``run(flags, options)`` each, with flags as strings for the settings"""

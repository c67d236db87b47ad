"""From words on a command line to one typed configuration: `compose.load_config`."""

"""Starting, watching and asking the device-proxy servers of a job."""

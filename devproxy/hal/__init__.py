"""What devproxy runs on."""

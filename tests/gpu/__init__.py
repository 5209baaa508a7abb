"""What needs a real GPU: recording the runs that everything else is compared with."""

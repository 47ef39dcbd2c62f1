"""What reading a part of a long text loses: the caches that choose pages, beside choosers that are simulated on exact keys."""

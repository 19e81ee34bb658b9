"""Models that the suite builds itself, because the originals cannot be installed or need a download."""

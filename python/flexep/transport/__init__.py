"""Who can reach whose memory. Here: collectives over a process group, and plain copies inside one process."""

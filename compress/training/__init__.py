"""What learns, and from whom: teachers and labels, students, the loop, longer windows."""

"""The block server: accepts sessions, runs their steps by the rules, announces itself, drains."""

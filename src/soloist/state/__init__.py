"""What a sequence leaves behind: pages by position, recurrent states by slot. Commit, never roll back."""

"""What Covey does inside training frameworks, where a script asks for it."""

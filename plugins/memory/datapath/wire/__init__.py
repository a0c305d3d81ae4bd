"""What the byte processes of remote memory say to one another and to their agent."""

//! A minimal blocking client of Redis: one command, one reply.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// A connection.
pub(super) struct Client(BufReader<TcpStream>);

impl Client {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self(BufReader::new(stream))
    }

    /// Runs a command. Returns an array as its elements, one per line, a null as `(nil)`, and an error inside an
    /// array as `(error)` with its text.
    pub(super) fn call(&mut self, args: &[&str]) -> io::Result<String> {
        let words = args.iter().map(|arg| format!("${}\r\n{arg}\r\n", arg.len()));
        let request = format!("*{}\r\n{}", args.len(), words.collect::<String>());
        self.0.get_mut().write_all(request.as_bytes())?;
        self.reply()
    }

    fn reply(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        let Some(line) = line.strip_suffix("\r\n").filter(|line| line.is_char_boundary(1)) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let (kind, rest) = line.split_at(1);
        match (kind, rest) {
            ("+" | ":", _) => Ok(rest.to_owned()),
            ("-", _) => Err(io::Error::other(rest)),
            ("$" | "*", "-1") => Ok("(nil)".into()),
            ("$", len) => {
                let mut text = vec![0; number(len)?];
                self.0.read_exact(&mut text)?;
                self.0.read_exact(&mut [0; 2])?;
                Ok(String::from_utf8_lossy(&text).into_owned())
            }
            ("*", len) => {
                let part = |_| match self.reply() {
                    Err(error) if error.kind() == io::ErrorKind::Other => {
                        Ok(format!("(error) {error}"))
                    }
                    part => part,
                };
                let parts: io::Result<Vec<_>> = (0..number(len)?).map(part).collect();
                Ok(parts?.join("\n"))
            }
            _ => Err(io::Error::other(format!("not a RESP2 reply: {line:?}"))),
        }
    }
}

fn number(text: &str) -> io::Result<usize> {
    text.parse().map_err(io::Error::other)
}

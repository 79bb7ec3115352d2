//! Certificates for one test.

use std::path::Path;
use std::{fs, io};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// The certificate of the CA.
pub(super) const CA: &str = "ca.pem";
/// The certificate of the server, signed by the CA.
pub(super) const CERTIFICATE: &str = "server.pem";
/// The server's private key.
pub(super) const KEY: &str = "server.key";

/// Creates a CA and a server certificate, and writes these files.
pub(super) fn write_certificates(dir: &Path) -> io::Result<()> {
    let (ca, certificate, key) = certificates().map_err(io::Error::other)?;
    fs::write(dir.join(CA), ca)?;
    fs::write(dir.join(CERTIFICATE), certificate)?;
    fs::write(dir.join(KEY), key)
}

fn certificates() -> Result<(String, String, String), rcgen::Error> {
    let mut ca = CertificateParams::new([])?;
    // If both had the same name, the server's certificate would look self-signed.
    ca.distinguished_name.push(DnType::CommonName, "lockkeeper test authority");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let ca_key = KeyPair::generate()?;
    let ca_certificate = ca.self_signed(&ca_key)?;

    let mut server = CertificateParams::new(["localhost".into(), "127.0.0.1".into()])?;
    server.distinguished_name.push(DnType::CommonName, "localhost");
    server.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    // Strict clients require it.
    server.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    let certificate = server.signed_by(&key, &Issuer::new(ca, ca_key))?;
    Ok((ca_certificate.pem(), certificate.pem(), key.serialize_pem()))
}

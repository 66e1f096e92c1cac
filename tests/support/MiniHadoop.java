import java.io.IOException;
import java.io.OutputStream;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.nio.file.Files;
import java.nio.file.Path;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.hdfs.HdfsConfiguration;
import org.apache.hadoop.hdfs.MiniDFSCluster;
import org.apache.hadoop.yarn.conf.YarnConfiguration;
import org.apache.hadoop.yarn.server.MiniYARNCluster;
import org.apache.hadoop.yarn.server.resourcemanager.scheduler.fifo.FifoScheduler;

/**
 * HDFS in one process, on loopback, until it is killed; if asked for, YARN with one node beside it.
 *
 * <p>Arguments: a folder for all of it, the port of the NameNode, and {@code yarn} for YARN. In the folder are then {@code conf}, a
 * HADOOP_CONF_DIR, and {@code ready}, a file that is there when all answers.
 */
public final class MiniHadoop {
  private static final String HOST = "127.0.0.1";

  public static void main(String[] args) {
    try {
      start(Path.of(args[0]), Integer.parseInt(args[1]), args.length > 2);
    } catch (Throwable failure) {
      // Threads of what has started already would keep it alive.
      failure.printStackTrace();
      System.exit(1);
    }
  }

  private static void start(Path folder, int port, boolean withYarn) throws Exception {
    Configuration conf = new HdfsConfiguration();
    conf.set(MiniDFSCluster.HDFS_MINIDFS_BASEDIR, folder.resolve("dfs").toString());
    // With one replica a file is hardly ever closed at once: its DataNode's report comes behind the client's question, which is
    // asked again after half a second.
    conf.set("dfs.replication", "2");
    MiniDFSCluster dfs = new MiniDFSCluster.Builder(conf).numDataNodes(2).nameNodePort(port).build();
    dfs.waitActive();
    Files.createDirectories(folder.resolve("conf"));
    Configuration client = new Configuration(false);
    client.set("fs.defaultFS", "hdfs://" + HOST + ":" + port);
    client.set("dfs.replication", "2");
    write(client, folder.resolve("conf/core-site.xml"));
    if (withYarn) {
      startYarn(client, folder);
    }
    Files.createFile(folder.resolve("ready"));
  }

  private static void startYarn(Configuration dfs, Path folder) throws IOException {
    Configuration site = new Configuration(false);
    // What says no address would listen on the host's name.
    site.set("yarn.minicluster.fixed.ports", "true");
    site.set("yarn.resourcemanager.hostname", HOST);
    for (String name : new String[] {"", ".scheduler", ".resource-tracker", ".admin", ".webapp"}) {
      site.set("yarn.resourcemanager" + name + ".address", HOST + ":" + freePort());
    }
    site.set("yarn.nodemanager.hostname", HOST);
    for (String name : new String[] {"", ".localizer", ".webapp", ".collector-service"}) {
      site.set("yarn.nodemanager" + name + ".address", HOST + ":" + freePort());
    }
    site.set("yarn.nodemanager.resource.memory-mb", "8192");
    site.set("yarn.nodemanager.resource.cpu-vcores", "8");
    site.set("yarn.scheduler.minimum-allocation-mb", "256");
    site.set("yarn.resourcemanager.scheduler.class", FifoScheduler.class.getName());
    site.set("yarn.nodemanager.vmem-check-enabled", "false");
    site.set("yarn.nodemanager.disk-health-checker.enable", "false");
    site.set("yarn.resourcemanager.am.max-attempts", "3");
    YarnConfiguration conf = new YarnConfiguration();
    conf.addResource(dfs);
    conf.addResource(site);
    MiniYARNCluster yarn = new MiniYARNCluster("yarn", 1, 1, 1);
    yarn.init(conf);
    yarn.start();
    write(site, folder.resolve("conf/yarn-site.xml"));
  }

  private static int freePort() throws IOException {
    try (ServerSocket socket = new ServerSocket(0, 1, InetAddress.getByName(HOST))) {
      return socket.getLocalPort();
    }
  }

  private static void write(Configuration conf, Path file) throws IOException {
    try (OutputStream out = Files.newOutputStream(file)) {
      conf.writeXml(out);
    }
  }
}
